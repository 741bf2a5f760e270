"""Which operators a sparse save holds in full: a schedule by bytes (MoEtion). Pure but for `SparseWindow.fit`.

An *operator* is an expert, the router of a layer, or what else a layer has. In each save of a window the operators of
one slot are saved in full; of those in later slots, the weight with which the model computes; of those in earlier
slots, nothing. A replay brings all of them to the last iteration.

>>> sizes = {name: OperatorSize(full=12, cast=2) for name in "abcdef"}
>>> pack_slots(sizes, nbytes=32)
(('a', 'b'), ('c', 'd'), ('e', 'f'))
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf, isfinite

from ucp.conversion.option import path_parser, type_path
from ucp.core.index import WEIGHT, Index, Kind
from ucp.errors import UsageError, format_list
from ucp.io.folder import parse_path
from ucp.moe.layers import find_layers
from ucp.source.read import index_of

_LAYER = re.compile(r"(?:.*?\.)??\d{1,18}(?=\.)")
"""Path of a layer: that of a parameter, to the first number. Example: model.layers.3 of model.layers.3.norm.weight."""


@dataclass(frozen=True, slots=True)
class OperatorSize:
    """Bytes of an operator."""

    full: int
    """Of all its states."""
    cast: int
    """Of the weights with which the model computes."""


@dataclass(frozen=True, slots=True)
class SparseWindow:
    """In each save the full states of some operators; the operators take turns (a sparse window, MoEtion)."""

    slots: tuple[tuple[str, ...], ...]
    """The operators that each save of a window holds in full; `find_operators` names them."""
    first: int = 1
    """Iteration of the first save of a window; the next windows follow it, with a save for every iteration."""

    def __post_init__(self) -> None:
        names = list(chain.from_iterable(self.slots))
        twice = [f"{name} in several" for name, count in Counter(names).items() if count > 1]
        if not all(self.slots) or not names or twice or isinstance(self.first, bool) or not isinstance(self.first, int):
            raise UsageError(
                f"expected slots of operators, each in one slot, and an iteration; got first={self.first!r} and "
                f"{len(self.slots)} slots, {sum(not slot for slot in self.slots)} of them empty\n{format_list(twice)}"
            )

    @classmethod
    def fit(
        cls,
        checkpoint: type_path,
        *,
        bandwidth: float,
        seconds: float,
        first: int = 1,
        popularity: Mapping[str, Sequence[float]] | None = None,
    ) -> SparseWindow:
        """The shortest window whose saves are written while an iteration runs.

        `checkpoint`: a full one of the model, in any format, for the bytes of its operators. `bandwidth`: bytes that
        all ranks together write per second. `seconds`: time of an iteration. `popularity`: path of a layer's module to
        a number for each expert, e.g. its tokens of late: the popular ones are saved last, so that they are replayed
        least. Raises UsageError if an operator does not fit, or if the checkpoint lacks optimizer states, as one that
        was saved before the first step does; SourceError.
        """
        if not all(isinstance(n, int | float) and 0 < n < inf for n in (bandwidth, seconds)):
            raise UsageError(f"expected bandwidth and seconds above 0; got {bandwidth!r} and {seconds!r}")
        index = index_of(path_parser("checkpoint", parse_path)(checkpoint))
        _check_states(index)
        operators = find_operators(index.shapes, _find_buffers(index))
        sizes = {name: _measure(index, params) for name, params in operators.items()}
        always = sum(index.atoms[name].nbytes for name in _find_buffers(index))
        order = order_operators(operators, index.shapes, popularity or {})
        return cls(
            pack_slots({name: sizes[name] for name in order}, nbytes=int(min(bandwidth * seconds, 1e18)) - always),
            first=first,
        )

    def begins_at(self, step: int) -> bool:
        """Whether a window begins with the save of iteration `step`: only then may another schedule take over."""
        return (step - self.first) % len(self.slots) == 0

    def divide(self, operators: Mapping[str, Sequence[str]], step: int) -> tuple[frozenset[str], frozenset[str]]:
        """Parameters that the save of iteration `step` leaves out, and those of which it holds the cast alone.

        Raises UsageError unless the slots hold exactly these operators.
        """
        scheduled = dict.fromkeys(chain.from_iterable(self.slots))
        wrong = [f"{name}: in no slot" for name in operators if name not in scheduled]
        wrong += [f"{name}: not an operator of the model" for name in scheduled if name not in operators]
        if wrong or step < self.first:
            wrong = wrong or [f"step {step} is before {self.first}, the first of the plan"]
            raise UsageError(f"expected a SparseWindow of the operators of this model; got\n{format_list(wrong)}")
        number = (step - self.first) % len(self.slots)
        earlier, later = (
            frozenset(param for name in chain.from_iterable(slots) for param in operators[name])
            for slots in (self.slots[:number], self.slots[number + 1 :])
        )
        return earlier, later

    @staticmethod
    def has_shifted(before: Mapping[str, Sequence[float]], now: Mapping[str, Sequence[float]]) -> bool:
        """Whether a quarter of the experts are used more, or less, by over 10 % than `before`: order them anew.

        Both: path of a layer's module to a number for each expert. Shares of the layer's tokens are compared. Raises
        UsageError if they are not of the same experts.
        """
        sizes = [{module: len(counts) for module, counts in counted.items()} for counted in (before, now)]
        if sizes[0] != sizes[1]:
            raise UsageError(f"expected the same layers and experts; got {sizes[0]} and {sizes[1]}")
        changes = []
        for module, counts in before.items():
            for old, new in zip(counts, now[module], strict=True):
                share, share_now = old / (sum(counts) or 1), new / (sum(now[module]) or 1)
                changes.append(abs(share_now - share) > 0.1 * share)
        return bool(changes) and sum(changes) >= len(changes) / 4


def find_operators(shapes: Mapping[str, tuple[int, ...]], buffers: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """Operators of a model, in its order, to their parameters. `shapes`: of all parameters and buffers.

    Experts that are rows of one tensor are one operator, as a save holds tensors whole. `buffers`, which every save
    holds, belong to none.

    >>> names = ["embed.weight", "layers.0.norm.weight", "layers.0.moe.gate.weight", "layers.0.moe.experts.1.w1.weight"]
    >>> list(find_operators(dict.fromkeys(names, (2, 2)), frozenset()))
    ['embed', 'layers.0', 'layers.0.moe.router', 'layers.0.moe.experts.1']
    """
    owners: dict[str, str] = {}
    for layer in find_layers(shapes):
        owners |= dict.fromkeys(layer.routing.values(), f"{layer.module}.router")
        for expert, tensors in layer.experts.items():
            for tensor in tensors.values():
                number = f".{expert}" if tensor.row is None else ""
                owners[tensor.param] = f"{layer.module}.experts{number}"
    operators: dict[str, list[str]] = {}
    for param in shapes:
        if param not in buffers:
            match = _LAYER.match(param)
            rest = match[0] if match else param.rpartition(".")[0] or param
            operators.setdefault(owners.get(param, rest), []).append(param)
    return {name: tuple(params) for name, params in operators.items()}


def order_operators(
    operators: Mapping[str, Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
    popularity: Mapping[str, Sequence[float]],
) -> list[str]:
    """Experts, the least popular first; then the other operators, in the order of the model.

    Raises UsageError for popularity of other layers, or of another number of experts.
    """
    layers = {layer.module: layer for layer in find_layers(shapes)}
    numbers: dict[str, float] = {}
    wrong = [f"{module}: expected none, as it has no experts" for module in popularity if module not in layers]
    for module, layer in layers.items():
        values = popularity.get(module, () if popularity else [0.0] * layer.num_experts)
        if len(values) != layer.num_experts or not isfinite(sum(values)):
            wrong.append(
                f"{module}: expected a finite number for each of {layer.num_experts} experts; got {len(values)}"
            )
            continue
        numbers |= {f"{module}.experts.{expert}": values[expert] for expert in layer.experts}
        numbers[f"{module}.experts"] = sum(values)
    if wrong:
        raise UsageError(f"expected the popularity of the experts of every layer:\n{format_list(wrong)}")
    experts = [name for name in operators if name in numbers]
    return [*sorted(experts, key=numbers.__getitem__), *(name for name in operators if name not in numbers)]


def pack_slots(sizes: Mapping[str, OperatorSize], *, nbytes: int) -> tuple[tuple[str, ...], ...]:
    """Operators, in their order, in as few slots as possible: no save of the window has more than `nbytes` bytes.

    A slot is closed when the next operator would not fit beside the casts of all later ones. Raises UsageError if a
    slot cannot hold even one operator.
    """
    slots: list[list[str]] = []
    full, casts = 0, sum(size.cast for size in sizes.values())
    for name, size in sizes.items():
        casts -= size.cast
        if not slots or full + size.full + casts > nbytes:
            slots.append([])
            full = 0
        full += size.full
        slots[-1].append(name)
        if full + casts > nbytes:
            raise UsageError(
                f"expected at most {nbytes:,} bytes in a save (bandwidth x seconds); the states of {name} take "
                f"{size.full:,}, and the weights of the operators after it {casts:,}. Let more ranks write "
                "(bandwidth), or let a save take longer than an iteration (seconds): the run then waits for it"
            )
    return tuple(map(tuple, slots))


def _find_buffers(index: Index) -> frozenset[str]:
    return frozenset(name for name, atom in index.atoms.items() if atom.kind is Kind.BUFFER)


def _check_states(index: Index) -> None:
    """Raise UsageError if trained parameters have no optimizer states yet: their bytes would not be counted."""
    bare = {
        name for name, atom in index.atoms.items() if atom.kind is Kind.PARAMETER and atom.states.keys() == {WEIGHT}
    }
    for group in index.groups:
        if bare.issuperset(group.params) and not (group.hyper.get("betas") or group.hyper.get("momentum")):
            bare.difference_update(group.params)  # its optimizer keeps none, as SGD without momentum
    if bare:
        raise UsageError(
            f"expected a checkpoint with the optimizer states of every trained parameter, to count their bytes; "
            f"{index.path} has none of\n{format_list(sorted(bare))}\nSave it after an iteration that has stepped them"
        )


def _measure(index: Index, params: Sequence[str]) -> OperatorSize:
    atoms = [index.atoms[name] for name in params]
    casts = (atom.states[WEIGHT].numel * (atom.model_dtype or atom.states[WEIGHT].dtype).itemsize for atom in atoms)
    return OperatorSize(full=sum(atom.nbytes for atom in atoms), cast=sum(casts))
