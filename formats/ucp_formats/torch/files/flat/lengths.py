"""FSDP1's flat parameters: many parameters end to end, cut over ranks without regard to where one ends.

A flat parameter belongs to a wrapped module. It holds the parameters below that module that no wrapped module further
down holds, in the order in which they were registered, which is that of a state dict.

Without `use_orig_params` nothing lies between two parameters, and a file records lengths only: shapes are accepted if
they add up to just that length. With it, each parameter starts at a multiple of 16 bytes of the type in which the
module computes, which no file records. But every rank then also saves its part of each parameter under the
parameter's name, so that the named parts are read, and the flat parameter only proves that none is missing.

Sources: torch 2.13, `torch/distributed/fsdp/_flat_param.py` (`_init_flat_param_and_metadata`, `_get_unpadded_shard`),
`_state_dict_utils.py` (`_local_post_state_dict_hook`).

>>> from ucp.core.tensor import DType
>>> shards = [TensorRef(path=f"rank{r}", offset=0, dtype=DType.FLOAT32, shape=(4,), strides=(1,)) for r in (0, 1)]
>>> params = split_flat({"a": (3,), "b": (2, 2)}, [shards], numel=7, where="x")
>>> [(str(fragment.box), fragment.ref.path) for fragment in params["b"].fragments]
[('[0:1, 0:1]', 'rank0'), ('[0:1, 1:2]', 'rank1'), ('[1:2, 0:2]', 'rank1')]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from ucp.contract.layouts import FlatBuffer, Span
from ucp.contract.plugins import pattern
from ucp.core.layout import AxisLayout, Layout
from ucp.core.tensor import TensorRef
from ucp.core.union import StoredShard, place_fragments
from ucp.errors import MalformedError
from ucp_formats.torch.files.joined import COPIES, Joined

Shapes = Mapping[str, tuple[int, ...]]
"""Name to elements per dim, in the order of the model."""

_ALIGNMENTS = (1, 2, 4, 8, 16)
"""Elements at whose multiples parameters may start: none before torch 2.1, then 16 bytes of float64 to float8."""


def split_flat(
    shapes: Shapes,
    copies: Sequence[Sequence[TensorRef | None]],
    *,
    numel: int,
    where: str,
    is_padded: bool = False,
) -> dict[str, Joined]:
    """The parameters in a flat one of `numel` elements, end to end.

    `copies`: the shards of it, in order, once for each copy. `is_padded`: each has the same number of elements, as
    optimizers have them. Raises MalformedError for parameters of another length.
    """
    counts = [prod(shape) for shape in shapes.values()]
    ranks = len(copies[0])
    if numel != (_rounded(sum(counts), ranks) if is_padded else sum(counts)):
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
        name: _joined(shape, axes[name], copies, [own.get(name) for own in spans]) for name, shape in shapes.items()
    }


def proves_parts(widths: Sequence[Sequence[int]], numel: int) -> bool:
    """Whether parameters of which each rank has so many elements make up a flat one of `numel`, with its padding.

    >>> proves_parts([(3, 0), (0, 4)], 8), proves_parts([(3, 0)], 8), proves_parts([(3, 0), (2, 2)], 8)
    (True, False, False)
    """
    ranks = len(widths[0])
    share = -(-numel // ranks)
    for alignment in _ALIGNMENTS:
        starts = [0]
        for parts in widths:
            stop = starts[-1] + sum(parts)
            starts.append(_rounded(stop, alignment))
        numels = {str(at): sum(parts) for at, parts in enumerate(widths)}
        buffer = FlatBuffer.pack(numels, ranks=ranks, share=share, starts=starts[:-1], known_from="")
        spans = [buffer.spans(rank) for rank in range(ranks)]
        fits = all(
            tuple(parts) == tuple(own[str(at)].numel if str(at) in own else 0 for own in spans)
            for at, parts in enumerate(widths)
        )
        if fits and numel in (stop, _rounded(stop, ranks)):
            return True
    return False


def join_parts(shape: tuple[int, ...], copies: Sequence[Sequence[TensorRef | None]], where: str) -> Joined:
    """A parameter of which every rank has a part, one after another (`use_orig_params`).

    Raises MalformedError where they are not as many elements as it has.
    """
    widths = {tuple(0 if ref is None else ref.numel for ref in shards) for shards in copies}
    if len(widths) != 1 or sum(held := next(iter(widths))) != prod(shape):
        raise MalformedError(
            f"expected {prod(shape)} elements of {where} over all ranks; got {' or '.join(map(str, map(sum, widths)))}"
        )
    axis = AxisLayout("dp_shard", len(held), pattern("cut", dim=0, widths=(held,)), "flat parameters of FSDP1")
    return _joined(shape, axis, copies, [Span(0, numel) for numel in held])


def _joined(
    shape: tuple[int, ...],
    cut: AxisLayout,
    copies: Sequence[Sequence[TensorRef | None]],
    spans: Sequence[Span | None],
) -> Joined:
    """A parameter from the shards of a flat one, of which each holds the span; once for each copy."""
    replicas = (AxisLayout(COPIES, len(copies), pattern("replicate"), cut.known_from),) if len(copies) > 1 else ()
    layout = Layout(axes=replicas, flat=(cut,))
    stored = [
        StoredShard({COPIES: copy, cut.axis: number}, ref, span.start)
        for copy, shards in enumerate(copies)
        for number, (ref, span) in enumerate(zip(shards, spans, strict=True))
        if ref is not None and span is not None
    ]
    return Joined(
        dtype=next(ref.dtype for shards in copies for ref in shards if ref is not None),
        shape=shape,
        fragments=place_fragments(layout, shape, stored),
        layout=layout,
        is_shared=True,
    )


def units_of(shapes: Shapes, lengths: Sequence[int], ranks: int) -> list[list[str]] | None:
    """Names that each of the flat parameters of these lengths holds; None where none, or several ways fit.

    `lengths`: elements with padding, in the order of the optimizer: the outermost module first, if it has any of its
    own, then those below it in the order of the model. Modules wrapped within wrapped ones are not looked for.

    >>> shapes = {"emb": (6,), "l.0.w": (4,), "l.0.b": (1,), "l.1.w": (4,), "l.1.b": (1,)}
    >>> units_of(shapes, [6, 6, 6], 2)
    [['emb'], ['l.0.w', 'l.0.b'], ['l.1.w', 'l.1.b']]
    """
    names = list(shapes)
    found: dict[tuple[tuple[str, ...], ...], None] = {}
    for has_root in (True, False):
        inner = [*lengths[1:]] if has_root else [*lengths]
        for runs in _runs(shapes, inner, lengths[0] if has_root else 0, ranks):
            inside = {name for low, high in runs for name in names[low:high]}
            root = [tuple(name for name in names if name not in inside)] if has_root else []
            found[*root, *(tuple(names[low:high]) for low, high in runs)] = None
    return [list(own) for own in next(iter(found))] if len(found) == 1 else None


_Runs = tuple[tuple[int, int], ...]
"""First and one past the last of the names that each unit below the outermost holds."""


def _runs(shapes: Shapes, inner: Sequence[int], root_length: int, ranks: int) -> list[_Runs]:
    """Ways to give each unit a module's names, the first two; what is left over is the outermost module's."""
    names = list(shapes)
    ways: list[dict[tuple[int, int], list[_Runs]]] = [{} for _ in range(len(names) + 1)]
    ways[0][0, 0] = [()]
    for at, name in enumerate(names):
        stops = [(stop, _rounded(_total(names[at:stop], shapes), ranks)) for stop in _stops(names, at)]
        for (units, left), runs in ways[at].items():
            if (more := left + prod(shapes[name])) <= root_length:
                _add(ways[at + 1], (units, more), runs)
            for stop, length in stops:
                if units < len(inner) and length == inner[units]:
                    _add(ways[stop], (units + 1, left), [(*own, (at, stop)) for own in runs])
        ways[at] = {}
    ends = [
        runs for (units, left), runs in ways[-1].items() if units == len(inner) and _rounded(left, ranks) == root_length
    ]
    return [own for runs in ends for own in runs][:2]


def _add(ways: dict[tuple[int, int], list[_Runs]], key: tuple[int, int], runs: list[_Runs]) -> None:
    ways[key] = [*ways.get(key, []), *runs][:2]


def _stops(names: list[str], at: int) -> Iterator[int]:
    """Ends of the runs of names, from `at` on, that are all those of one module."""
    parts = names[at].split(".")
    ends = set()
    for depth in range(1, len(parts)):
        prefix = ".".join(parts[:depth]) + "."
        if at and names[at - 1].startswith(prefix):
            continue
        stop = at
        while stop < len(names) and names[stop].startswith(prefix):
            stop += 1
        ends.add(stop)
    yield from sorted(ends)


def _total(names: Sequence[str], shapes: Shapes) -> int:
    return sum(prod(shapes[name]) for name in names)


def _rounded(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple
