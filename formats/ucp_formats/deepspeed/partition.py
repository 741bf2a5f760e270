"""How DeepSpeed flattens and partitions parameters; readers and writers use the same arithmetic.

Stages 1 and 2 (and BF16_Optimizer): the parameters of an optimizer group follow one another in a flat buffer, padded at
its end to a multiple of 2 * ranks elements, and each rank holds an equal `share` of it. Stage 3: each parameter is
split into one chunk per rank, and the chunks of a rank follow one another in a flat tensor per sub-group. Patterns
compute which elements of a parameter a rank holds: see `ucp.contract.layouts`.

`param_shapes` is always in the order of the buffer. The optimizer's order differs from it under
`round_robin_gradients`, which assigns parameters to the ranks in turn. `param_slice_mappings` follows the optimizer's
order. Up to 0.19.8 its offsets are wrong when the two orders differ, so no element is located by them: they are only
compared with the computed layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise, repeat
from math import gcd
from operator import add

from ucp.contract.layouts import FlatBuffer

START_ALIGNMENT = 2
"""Elements; `nccl_start_alignment_factor` of stage_1_and_2.py and bf16_optimizer.py, 0.19.8."""

PARAMETER_ALIGNMENT = 16
"""Bytes; `zero_optimization.parameter_alignment` of stage_1_and_2.py, 0.19.8."""


def share(used: int, *, ranks: int) -> int:
    """Elements of a flat buffer that each rank holds, with padding; `used`: elements up to the last parameter's end.

    >>> share(7, ranks=2)
    4
    """
    return -(-used // (START_ALIGNMENT * ranks)) * START_ALIGNMENT


def shared_buffers(
    numels: Mapping[str, int], *, ranks: int, paddings: Sequence[int] | None, first: int, known_from: str
) -> tuple[FlatBuffer, ...]:
    """Possible layouts of the flat buffer of these parameters, the usual one first.

    `first`: elements in rank 0's file; versions that pad differently have shares of this length. `paddings`: elements
    of padding after each parameter.
    """
    *starts, used = accumulate(map(add, numels.values(), paddings or repeat(0)), initial=0)
    return tuple(
        FlatBuffer.pack(numels, ranks=ranks, share=length, starts=starts, known_from=known_from)
        for length in dict.fromkeys((share(used, ranks=ranks), first))
        if length * ranks >= used
    )


def alignment_paddings(numels: Sequence[int], *, itemsize: int) -> tuple[int, ...]:
    """Elements of padding after each parameter under `parameter_alignment`: each starts at a multiple of 16 bytes.

    `itemsize`: bytes per element of the model's parameters. The last parameter has no padding after it.

    >>> alignment_paddings([5, 8, 3], itemsize=2)
    (3, 0, 0)
    """
    unit = PARAMETER_ALIGNMENT // gcd(PARAMETER_ALIGNMENT, itemsize)
    return (*(-numel % unit for numel in numels[:-1]), *(0 for _ in numels[-1:]))


def round_robin(names: Sequence[str], *, ranks: int) -> tuple[str, ...]:
    """Order of the buffer under `round_robin_gradients`: parameters are dealt to the ranks in turn, then concatenated.

    >>> round_robin("abcde", ranks=2)
    ('a', 'c', 'e', 'b', 'd')
    """
    return tuple(name for rank in range(ranks) for name in names[rank::ranks])


def chunk(numel: int, *, ranks: int) -> int:
    """Elements of a stage-3 chunk, with padding."""
    return -(-numel // ranks)


def sub_groups(sizes: Sequence[tuple[str, int]], *, ranks: int, limit: int) -> tuple[tuple[str, ...], ...]:
    """Stage-3 sub-groups of an optimizer group: one is closed as soon as a rank's chunks in it reach `limit` elements.

    >>> sub_groups([("a", 4), ("b", 4), ("c", 4)], ranks=2, limit=4)
    (('a', 'b'), ('c',))
    """
    if limit >= sum(chunk(numel, ranks=ranks) for _, numel in sizes):
        return (tuple(name for name, _ in sizes),) if sizes else ()
    groups: list[tuple[str, ...]] = []
    open_names: list[str] = []
    elements = 0
    for name, numel in sizes:
        open_names.append(name)
        elements += chunk(numel, ranks=ranks)
        if elements >= limit:
            groups.append(tuple(open_names))
            open_names, elements = [], 0
    return (*groups, tuple(open_names)) if open_names else tuple(groups)


def optimizer_order(
    names: Sequence[str], *, ranks: int, is_round_robin: bool, mappings: Iterable[Iterable[str]]
) -> tuple[tuple[str, ...], bool]:
    """Parameters of a group in the order of its optimizer, and whether round robin gave the buffer another order.

    `names`: in the order of the buffer. `is_round_robin`: what the configuration states; it is overruled if only the
    opposite fits `mappings`, the names in `param_slice_mappings` of each rank, which follow the optimizer's order.
    """
    orders = {False: tuple(names), True: undo_round_robin(names, ranks=ranks)}
    recorded = [list(rank) for rank in mappings]
    fits = {}
    for key, order in orders.items():
        position = {name: at for at, name in enumerate(order)}
        runs = ([position[name] for name in rank if name in position] for rank in recorded)
        fits[key] = all(a < b for run in runs for a, b in pairwise(run))
    chosen = is_round_robin if fits[is_round_robin] or not fits[not is_round_robin] else not is_round_robin
    return orders[chosen], chosen


def undo_round_robin(names: Sequence[str], *, ranks: int) -> tuple[str, ...]:
    """The order that `round_robin` turned into `names`.

    >>> undo_round_robin(("a", "c", "e", "b", "d"), ranks=2)
    ('a', 'b', 'c', 'd', 'e')
    """
    places = [int(place) for place in round_robin([str(at) for at in range(len(names))], ranks=ranks)]
    return tuple(name for _, name in sorted(zip(places, names, strict=True)))
