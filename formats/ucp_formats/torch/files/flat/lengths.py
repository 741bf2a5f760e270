"""FSDP1's flat parameters: many parameters end to end, sharded over ranks regardless of where one ends.

A flat parameter belongs to a wrapped module. It holds the parameters of that module, in the order of its state dict,
without those of wrapped modules inside it.

Without `use_orig_params`, parameters are not padded, and a file records only the length of the flat parameter: shapes
are accepted if they add up to exactly that length. With `use_orig_params`, each parameter starts at a multiple of 16
bytes, counted in the module's compute dtype, which no file records. But every rank then also saves its part of each
parameter under the parameter's name: these parts are read, and the flat parameter only proves that none is missing.

Sources: torch 2.13, `torch/distributed/fsdp/_flat_param.py` (`_init_flat_param_and_metadata`, `_get_unpadded_shard`),
`_state_dict_utils.py` (`_local_post_state_dict_hook`).

>>> from ucp.core.tensor import DType
>>> shards = [TensorRef(path=f"rank{r}", offset=0, dtype=DType.FLOAT32, shape=(4,), strides=(1,)) for r in (0, 1)]
>>> params = split_flat({"a": (3,), "b": (2, 2)}, [shards], numel=7, where="x")
>>> [(str(fragment.box), fragment.ref.path) for fragment in params["b"].state.fragments]
[('[0:1, 0:1]', 'rank0'), ('[0:1, 1:2]', 'rank1'), ('[1:2, 0:2]', 'rank1')]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod

from ucp.contract.layouts import FlatBuffer, Span
from ucp.contract.plugins import pattern
from ucp.core.layout import AxisLayout, Layout
from ucp.core.tensor import TensorRef
from ucp.core.union import StoredShard
from ucp.errors import MalformedError
from ucp_formats.torch.files.global_tensor import COPIES, GlobalTensor

Shapes = Mapping[str, tuple[int, ...]]
"""Name of a parameter to its shape, in the order of the model."""

FlatShards = Sequence[Sequence[TensorRef | None]]
"""The shards of each copy of a flat parameter, in the order of the ranks; None for a rank without elements."""

_ALIGNMENTS = (1, 2, 4, 8, 16)
"""Parameters start at multiples of one of these, in elements: 1 before torch 2.1, since then 16 bytes, which are 2
elements of float64 and 16 of float8."""


def split_flat(
    shapes: Shapes,
    copies: FlatShards,
    *,
    numel: int,
    where: str,
    is_padded: bool = False,
) -> dict[str, GlobalTensor]:
    """The parameters that lie end to end in a flat parameter of `numel` elements.

    `is_padded`: all shards have the same number of elements, as in optimizers. Raises MalformedError if `shapes` do
    not add up to `numel`.
    """
    counts = [prod(shape) for shape in shapes.values()]
    ranks = len(copies[0])
    if numel != (_round_up(sum(counts), ranks) if is_padded else sum(counts)):
        raise MalformedError(
            f"{where} has {numel} elements{f', padded over {ranks} ranks' if is_padded else ''}; its parameters have "
            f"{sum(counts)}: {', '.join(shapes)}. The shapes are those of another model"
        )
    buffer = FlatBuffer.pack(
        dict(zip(shapes, counts, strict=True)),
        ranks=ranks,
        share=-(-numel // ranks),
        axis="dp_shard",
        known_from="flat parameters of FSDP1",
    )
    axes, spans = buffer.axes(), [buffer.spans(rank) for rank in range(ranks)]
    return {
        name: _place(shape, axes[name], copies, [by_name.get(name) for by_name in spans])
        for name, shape in shapes.items()
    }


def proves_parts(widths: Sequence[Sequence[int]], numel: int) -> bool:
    """Whether the parts of parameters make up a flat parameter of `numel` elements, with its padding.

    `widths`: for each parameter, the elements that each rank has.

    >>> proves_parts([(3, 0), (0, 4)], 8), proves_parts([(3, 0)], 8), proves_parts([(3, 0), (2, 2)], 8)
    (True, False, False)
    """
    ranks = len(widths[0])
    share = -(-numel // ranks)
    for alignment in _ALIGNMENTS:
        starts = [0]
        for of_ranks in widths:
            stop = starts[-1] + sum(of_ranks)
            starts.append(_round_up(stop, alignment))
        numels = {str(number): sum(of_ranks) for number, of_ranks in enumerate(widths)}
        buffer = FlatBuffer.pack(numels, ranks=ranks, share=share, starts=starts[:-1], known_from="")
        spans = [buffer.spans(rank) for rank in range(ranks)]
        fits = all(
            tuple(of_ranks) == tuple(by_name[name].numel if name in by_name else 0 for by_name in spans)
            for name, of_ranks in zip(numels, widths, strict=True)
        )
        if fits and numel in (stop, _round_up(stop, ranks)):
            return True
    return False


def join_parts(shape: tuple[int, ...], copies: FlatShards, where: str) -> GlobalTensor:
    """A parameter from the parts of the ranks, which follow one another (`use_orig_params`).

    Raises MalformedError if the parts have more or fewer elements than the parameter.
    """
    widths = {tuple(0 if ref is None else ref.numel for ref in shards) for shards in copies}
    if len(widths) != 1 or sum(numels := next(iter(widths))) != prod(shape):
        raise MalformedError(
            f"expected {prod(shape)} elements of {where} over all ranks; got {' or '.join(map(str, map(sum, widths)))}"
        )
    axis = AxisLayout("dp_shard", len(numels), pattern("cut", dim=0, widths=(numels,)), "flat parameters of FSDP1")
    return _place(shape, axis, copies, [Span(0, numel) for numel in numels])


def _place(
    shape: tuple[int, ...],
    axis: AxisLayout,
    copies: FlatShards,
    spans: Sequence[Span | None],
) -> GlobalTensor:
    """A parameter from the shards of its flat parameter; `spans`: where it lies in each shard."""
    replicas = (AxisLayout(COPIES, len(copies), pattern("replicate"), axis.known_from),) if len(copies) > 1 else ()
    stored = [
        StoredShard({COPIES: copy, axis.axis: number}, ref, span.start)
        for copy, shards in enumerate(copies)
        for number, (ref, span) in enumerate(zip(shards, spans, strict=True))
        if ref is not None and span is not None
    ]
    ref = next(ref for shards in copies for ref in shards if ref is not None)
    if 0 in shape:
        stored = [StoredShard({}, ref)]
    return GlobalTensor.place(ref.dtype, shape, Layout(axes=replicas, flat=(axis,)), tuple(stored))


def units_of(shapes: Shapes, lengths: Sequence[int], ranks: int) -> list[list[str]] | None:
    """Names of the parameters in each flat parameter, from its length alone; None unless exactly one answer fits.

    `lengths`: elements with padding, in the order of the optimizer: first the outermost module, if it has parameters
    outside the other wrapped modules, then these in the order of the model. It is assumed that they are not nested.

    >>> shapes = {"emb": (6,), "l.0.w": (4,), "l.0.b": (1,), "l.1.w": (4,), "l.1.b": (1,)}
    >>> units_of(shapes, [6, 6, 6], 2)
    [['emb'], ['l.0.w', 'l.0.b'], ['l.1.w', 'l.1.b']]
    """
    names = list(shapes)
    solutions: set[tuple[tuple[str, ...], ...]] = set()
    for has_root in (True, False):
        inner = [*lengths[1:]] if has_root else [*lengths]
        for runs in _find_runs(shapes, inner, lengths[0] if has_root else 0, ranks):
            inside = {name for low, high in runs for name in names[low:high]}
            root = [tuple(name for name in names if name not in inside)] if has_root else []
            solutions.add((*root, *(tuple(names[low:high]) for low, high in runs)))
    return [list(unit) for unit in solutions.pop()] if len(solutions) == 1 else None


_Runs = tuple[tuple[int, int], ...]
"""For each unit below the outermost: the position of its first name, and one past that of its last name."""


def _find_runs(shapes: Shapes, inner: Sequence[int], root_length: int, ranks: int) -> list[_Runs]:
    """Up to two ways to give each inner unit the names of one module; the outermost module has all other names."""
    names = list(shapes)
    # for each number of names done: (inner units filled, elements in the outermost unit) to ways that lead there
    partial: list[dict[tuple[int, int], list[_Runs]]] = [{} for _ in range(len(names) + 1)]
    partial[0][0, 0] = [()]

    def add(count: int, key: tuple[int, int], runs: list[_Runs]) -> None:
        partial[count][key] = [*partial[count].get(key, []), *runs][:2]

    for start, name in enumerate(names):
        numels = {stop: sum(prod(shapes[inside]) for inside in names[start:stop]) for stop in _find_stops(names, start)}
        for (units, in_root), runs in partial[start].items():
            if (numel := in_root + prod(shapes[name])) <= root_length:
                add(start + 1, (units, numel), runs)
            for stop, numel in numels.items():
                if units < len(inner) and _round_up(numel, ranks) == inner[units]:
                    add(stop, (units + 1, in_root), [(*run, (start, stop)) for run in runs])
        partial[start] = {}
    complete = (
        runs
        for (units, in_root), runs in partial[-1].items()
        if units == len(inner) and _round_up(in_root, ranks) == root_length
    )
    return list(chain.from_iterable(complete))[:2]


def _find_stops(names: list[str], start: int) -> list[int]:
    """Where a run of names that begins at `start` may end, so that it has all names of one module."""
    parts = names[start].split(".")
    stops = set()
    for depth in range(1, len(parts)):
        prefix = ".".join(parts[:depth]) + "."
        if not (start and names[start - 1].startswith(prefix)):
            stops.add(
                next((stop for stop in range(start, len(names)) if not names[stop].startswith(prefix)), len(names))
            )
    return sorted(stops)


def _round_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple
