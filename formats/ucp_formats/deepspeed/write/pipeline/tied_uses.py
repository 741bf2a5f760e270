"""Where the layers without a file that use a tied layer again can stand in the list of layers.

A stage that has a tied parameter has a layer that uses it. Where no file of such a layer can be of that stage, it is
one with a `forward_fn`: after all layers with a file, as heads are, or else in a gap between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, permutations, product

from ucp_formats.deepspeed.write.pipeline.checks import MOST_EXTRA
from ucp_formats.deepspeed.write.pipeline.layers import Pipeline

__all__ = ["Uses", "possible_uses"]

_AT_END = -1
"""A use after all layers with a file, in place of its layer."""


@dataclass(frozen=True, slots=True)
class Uses:
    """One possibility."""

    layers: int
    """Number of layers."""
    hidden: Mapping[str, Sequence[int]]
    """Key of tied layers to those without a file."""
    seen: Mapping[str, Sequence[int]]
    """The same for those with a file."""

    @property
    def every(self) -> dict[str, list[int]]:
        """Key of tied layers to all of them, increasing."""
        keys = dict.fromkeys((*self.seen, *self.hidden))
        return {key: sorted({*self.seen.get(key, ()), *self.hidden.get(key, ())}) for key in keys}

    def gaps(self, pipeline: Pipeline) -> int:
        """Hidden uses between layers with files."""
        return sum(layer < pipeline.free for own in self.hidden.values() for layer in own)


def possible_uses(pipeline: Pipeline, told: Mapping[str, Sequence[int]], layers: int | None) -> Iterator[Uses]:
    """All possibilities, the likeliest first: with the fewest uses in gaps, then with the fewest functions at the end.

    Parameters
    ----------
    told
        Key of tied layers to those without a file, where the user says so.
    layers
        Number of layers, where the user says so.
    """
    taken = {layer for own in told.values() for layer in own}
    free = max([pipeline.free, *(layer + 1 for layer in taken)])
    needs = [need for key in pipeline.tied_stages if key not in told for need in _needs(pipeline, key, taken)]
    ways = sorted(product(*(options for _, options in needs)), key=_gaps)
    for _, alike in groupby(ways, key=_gaps):
        same = list(alike)
        for extra in range(MOST_EXTRA + 1) if layers is None else range(1):
            for way in same:
                stop = free + extra + way.count(_AT_END) if layers is None else layers
                yield from _placed(pipeline, told, [key for key, _ in needs], way, range(free, stop))


def _gaps(way: Sequence[int | None]) -> int:
    """Uses in gaps between layers with files."""
    return sum(at not in (_AT_END, None) for at in way)


def _placed(
    pipeline: Pipeline,
    told: Mapping[str, Sequence[int]],
    keys: Sequence[str],
    way: Sequence[int | None],
    end: range,
) -> Iterator[Uses]:
    """Possibilities with the uses of one way, those at the end in any places of it."""
    for places in permutations(end, way.count(_AT_END)):
        rest = list(places)
        hidden: dict[str, list[int]] = {key: list(own) for key, own in told.items()}
        for key, at in zip(keys, way, strict=True):
            if at is not None:
                hidden.setdefault(key, []).append(rest.pop(0) if at == _AT_END else at)
        yield Uses(end.stop, hidden, pipeline.tied_layers)


def _needs(pipeline: Pipeline, key: str, taken: set[int]) -> Iterator[tuple[str, list[int | None]]]:
    """Key and, for every use without a file that there must be, the layers that can be it; None for no layer at all."""
    seen, stages = pipeline.tied_layers.get(key, []), sorted(pipeline.tied_stages[key])
    unseen = _unseen(pipeline, stages, list(seen))
    if len(stages) == len(seen) == 1 and not unseen:
        unseen = stages  # tied to nothing else that is seen
    for stage in unseen:
        first, stop = pipeline.window(stage)
        gaps = range(first, pipeline.free if stop is None else stop)
        options: list[int | None] = [_AT_END] if stop is None else []
        options += [layer for layer in reversed(gaps) if layer not in pipeline.layers and layer not in taken]
        yield key, options or [None]


def _unseen(pipeline: Pipeline, stages: Sequence[int], seen: list[int]) -> list[int]:
    """Stages that no layer with a file can be of: a layer is of one stage, and the first that can have it gets it."""
    unseen = []
    for stage in stages:
        layer = next((layer for layer in seen if _is_within(layer, pipeline.window(stage))), None)
        if layer is None:
            unseen.append(stage)
        else:
            seen.remove(layer)
    return unseen


def _is_within(layer: int, window: tuple[int, int | None]) -> bool:
    first, stop = window
    return first <= layer and (stop is None or layer < stop)
