"""Values of `torch.save` as entries of a state dict: one for each tensor of model and optimizer, one for all else.

What ranks saved is walked side by side. Only dicts and lists on the way to a model or an optimizer are taken apart:
everything else stays the value it was, an extra.

1. An optimizer is a dict with `param_groups`.
2. The model is the dict of tensors that the optimizers train (`model_dict`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_

from ucp.contract.ranks import Checksums, make_rank_extras
from ucp.contract.run_extras import MODULE_STATE, is_module_state
from ucp.core.index import Extra
from ucp.core.tensor import TensorRef
from ucp.errors import MalformedError, UnsupportedError, listed
from ucp.io.pickle.fields import described
from ucp.io.pickle.values import Stub
from ucp_formats.torch.files.joined import is_tensor, join, shape_of, unread_kind
from ucp_formats.torch.files.parts import part_of
from ucp_formats.torch.model_dict import FLAT, Path, Wanted, is_called_model, model_naming, model_path
from ucp_formats.torch.state_dict import Leaf

Ranked = Mapping[int, object]
"""Rank to the value that it saved."""

_GROUPS = "param_groups"
_OF_MODULES = ("_parameters", "_modules")
"""Attributes of a `torch.nn.Module`."""
_MOST_DEPTH = 16
"""Levels of dicts and lists above a model or an optimizer, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Entries of the files of all ranks."""

    model: tuple[Leaf, ...]
    """Entries of the model; beside flat parameters (FSDP1) the value of a plain tensor is a `Ranked`"""
    optimizer: tuple[Leaf, ...]
    """Entries of optimizers; the value of a tensor that ranks saved flat (FSDP1) is a `Ranked`"""
    extras: tuple[Extra, ...]
    """Everything else"""
    aside: tuple[str, ...]
    """Places in the extras of dicts of tensors, such as further models"""
    is_order_assumed: bool = False
    """Whether flat parameters, which record no names, were split in the order of shapes that the user passed"""


def leaves_of(items: Mapping[Path, Ranked], checksums: Checksums, where: str) -> Tree:
    """Entries of several files.

    `items`: path below which the value of a file stands, to the value by rank. `where`: for messages.

    Raises MalformedError where ranks contradict one another, UnsupportedError where nothing tells the model, or it is
    an object.
    """
    firsts = {path: next(iter(values.values())) for path, values in items.items()}
    optimizers = {at: value for path, own in firsts.items() for at, value in _dicts(own, path) if _is_optimizer(value)}
    model = _model_path(firsts, optimizers.values(), where)
    walk = _Walk(model, [*optimizers], checksums)
    for path, values in items.items():
        walk.go(path, values)
    tree = walk.tree()
    if not (tree.model and is_called_model(model)):
        modules = (place for path, own in firsts.items() for place in pickled_objects(own, path, _OF_MODULES))
        _refuse_modules((own for own in modules if not tree.model or is_called_model(own[0])), where)
    return tree


def _refuse_modules(modules: Iterable[tuple[Path, Stub]], where: str) -> None:
    """Raise UnsupportedError where a whole module was saved in place of its state dict."""
    names = [f"{_shown(path)} is {own.made_by}" if path else str(own.made_by) for path, own in modules]
    if names:
        raise UnsupportedError(
            f"expected a state dict in {where}; got a pickled nn.Module: {', '.join(names[:3])}. Load it where its "
            "class can be imported (torch.load with weights_only=False), and save its state_dict()"
        )


def pickled_objects(value: object, path: Path, attributes: Iterable[str]) -> Iterator[tuple[Path, Stub]]:
    """Objects with all of `attributes` in a value that stands at `path`, with their paths."""
    places = [
        (path, value),
        *(((*at, key), own) for at, entries in _dicts(value, path) for key, own in entries.items()),
    ]
    for at, own in places:
        if isinstance(own, Stub) and all(own.attribute(name) is not None for name in attributes):
            yield at, own


def _is_optimizer(value: dict[object, object]) -> bool:
    return isinstance(value.get(_GROUPS), list)


def _entries(value: object) -> Iterator[tuple[object, object]]:
    return iter(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())


def _dicts(value: object, path: Path) -> Iterator[tuple[Path, dict[object, object]]]:
    """All dicts in a value with their paths, outermost first, and none inside of optimizers."""
    rest = [(path, value)]
    for at, own in rest:
        if isinstance(own, dict):
            yield at, own
        if len(at) < _MOST_DEPTH and not (isinstance(own, dict) and _is_optimizer(own)):
            rest += [((*at, key), inner) for key, inner in _entries(own) if isinstance(inner, dict | list)]


def _model_path(firsts: Mapping[Path, object], optimizers: Iterable[dict[object, object]], where: str) -> Path:
    dicts: dict[Path, dict[str, tuple[int, ...]]] = {}
    for path, own in firsts.items():
        for at, value in _dicts(own, path):
            tensors = {
                key: shape_of(inner) for key, inner in value.items() if isinstance(key, str) and is_tensor(inner)
            }
            if tensors and not _is_optimizer(value):
                dicts[at] = tensors
    return model_path(dicts, reduce(or_, map(_wanted, optimizers), Wanted()), where) if dicts else ("model",)


def _wanted(optimizer: dict[object, object]) -> Wanted:
    """What an optimizer trains. The last state with dims has the shape of its parameter."""
    groups, states = optimizer[_GROUPS], optimizer.get("state")
    shapes = {
        str(number): shape_of(value)
        for number, own in (states.items() if isinstance(states, dict) else ())
        for _, value in _entries(own)
        if is_tensor(value) and shape_of(value)
    }
    return Wanted.of(groups if isinstance(groups, list) else (), shapes)


class _Walk:
    """Collects entries of model and optimizers."""

    def __init__(self, model: Path, optimizers: list[Path], checksums: Checksums) -> None:
        self._model_path = model
        self._optimizer_paths = optimizers
        self._checksums = checksums
        self._has_flat = False
        self._naming: Callable[[str], str] = str
        self._model: list[Leaf] = []
        self._states: list[tuple[Path, Ranked]] = []
        self._values: list[Leaf] = []
        self._extras: list[Extra] = []
        self._aside: list[str] = []
        self._unread: list[str] = []

    def go(self, path: Path, values: Ranked) -> None:
        """Take the values at `path`: apart where an entry of model or optimizer lies below, else as they are."""
        is_tensors = all(map(is_tensor, values.values()))
        if path[:-1] == self._model_path and path and is_module_state(path[-1]):
            name = f"{MODULE_STATE}{self._naming(str(path[-1]))}"
            self._extras += make_rank_extras(name, values, self._checksums)
        elif any(path[: len(root)] == root and path != root for root in self._optimizer_paths):
            self._in_optimizer(path, values, is_tensors=is_tensors)
        elif is_tensors and path[:-1] == self._model_path:
            is_stretch = self._has_flat and all(isinstance(own, TensorRef) for own in values.values())
            self._model.append(Leaf(path, None, dict(values)) if is_stretch else self._tensor(path, values))
        elif any(root[: len(path)] == path for root in (self._model_path, *self._optimizer_paths)):
            self._below(path, values)
        else:
            kind = unread_kind(next(iter(values.values()))) if path[:-1] == self._model_path else None
            self._unread += [f"{path[-1]}: {kind}"] if kind else []
            self._other(path, values)

    def _below(self, path: Path, values: Ranked) -> None:
        if path == self._model_path:
            keys = [str(key) for key, own in _entries(next(iter(values.values()))) if is_tensor(own)]
            self._has_flat = any(key.endswith(FLAT) for key in keys)
            self._naming = model_naming(keys)
        entries = {rank: dict(_entries(own)) for rank, own in values.items()}
        if _GROUPS in path:
            self._check_same_keys(path, entries)
        for key in dict.fromkeys(key for own in entries.values() for key in own):
            self.go((*path, key), {rank: own[key] for rank, own in entries.items() if key in own})

    def _in_optimizer(self, path: Path, values: Ranked, *, is_tensors: bool) -> None:
        first = next(iter(values.values()))
        if is_tensors:
            self._states.append((path, values))
        elif isinstance(first, dict) or (isinstance(first, list) and any(isinstance(own, dict) for own in first)):
            self._below(path, values)
        else:
            self._values.append(Leaf(path, None, self._common(path, values)))

    def _tensor(self, path: Path, values: Ranked) -> Leaf:
        joined = join(values, _shown(path))
        return Leaf(path, joined.shape, joined, joined.form, joined.storage, is_place=True)

    def _check_same_keys(self, path: Path, entries: Mapping[int, Mapping[object, object]]) -> None:
        """Raise MalformedError for a group or a setting of the optimizer that some ranks have and others lack."""
        (first, keys), *others = ((rank, own.keys()) for rank, own in entries.items())
        for rank, own in others:
            if odd := sorted(map(str, own ^ keys)):
                raise MalformedError(
                    f"expected the same entries of {_shown(path)} on all ranks; of ranks {first} and {rank} only one "
                    f"has {', '.join(odd)}. The files are of different runs, or of different steps"
                )

    def _common(self, path: Path, values: Ranked) -> object:
        """The value that all ranks have."""
        firsts = self._checksums.find_first_same(values.values())
        other = next((at for at in firsts if at), None)
        if other is not None:
            ranks = list(values)
            raise MalformedError(
                f"expected one value of {_shown(path)} on all ranks; rank {ranks[0]} has "
                f"{described(values[ranks[0]])}, rank {ranks[other]} {described(values[ranks[other]])}. The files are "
                "of different runs, or of different steps"
            )
        return next(iter(values.values()))

    def _other(self, path: Path, values: Ranked) -> None:
        name = _shown(path)
        self._extras += make_rank_extras(name, values, self._checksums)
        first = next(iter(values.values()))
        if isinstance(first, dict) and sum(map(is_tensor, first.values())) > 1:
            self._aside.append(name)

    def tree(self) -> Tree:
        """What was collected.

        An optimizer of FSDP1 that was saved by its own `state_dict` has numbers, and plain tensors beside a model in
        parts. Raises UnsupportedError for tensors of the model that are not plain.
        """
        if self._unread:
            raise UnsupportedError(
                f"expected plain tensors in {_shown(self._model_path) or 'the model'}; got others, whose elements are "
                f"not known here:\n{listed(self._unread)}\nSave them as plain tensors (own.dequantize(), "
                "own.to_dense(), own.resolve_conj(), own.as_subclass(torch.Tensor)), or leave them out"
            )
        has_parts = any(getattr(own.value, "is_shared", False) for own in self._model)
        in_parts = any(part_of(own, "") for _, values in self._states for own in values.values())
        is_flat = has_parts and not in_parts
        states = [
            Leaf(path, None, values)
            if is_flat and isinstance(path[-2], int) and _has_dims(values)
            else self._tensor(path, values)
            for path, values in self._states
        ]
        return Tree(
            model=tuple(self._model),
            optimizer=(*states, *self._values),
            extras=tuple(self._extras),
            aside=tuple(self._aside),
        )


def _shown(path: Path) -> str:
    return "/".join(map(str, path))


def _has_dims(values: Ranked) -> bool:
    return any(getattr(own, "shape", ()) for own in values.values())
