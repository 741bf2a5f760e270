"""Which layers each stage of a pipeline has, where only the shapes of its optimizer tell.

Stages have layers one after another. All ways to deal them out under which every stage's optimizer fits its layers are
looked for; parameters must come out the same under each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ucp.errors import UnsupportedError
from ucp.tensor import TensorRef
from ucp_formats.deepspeed.matching import AmbiguousError, NoMatchError, match
from ucp_formats.deepspeed.whole_source import WholeOptimizer, slots_of

__all__ = ["split_layers"]

_REMEDY = (
    "Save again with an optimizer built from model.named_parameters() (torch 2.6 or later keeps the names), or with "
    "ZeRO stage 1"
)

_Names = tuple[tuple[str, ...], ...]


def split_layers(
    optimizers: Sequence[WholeOptimizer], params: Mapping[str, TensorRef], where: str
) -> list[dict[str, TensorRef]]:
    """Parameters of the layers of each stage. Raises UnsupportedError when none or several assignments fit."""
    dealing = _Dealing(optimizers, params)
    found: set[tuple[_Names, ...]] = set()
    try:
        for split in dealing.splits(0, 0):
            found.add(split)
            if len(found) > 1:
                break
    except AmbiguousError:
        found.clear()
    if len(found) != 1:
        raise UnsupportedError(
            f"expected one way to deal the {len(dealing.layers)} layers in {where} out to the optimizers of its "
            f"{len(optimizers)} stages, which do not name their parameters; {'several fit' if found else 'none fits'} "
            f"for certain. A layer tied to one of another stage has no file. {_REMEDY}"
        )
    (groups,) = found
    return [{name: params[name] for group in own for name in group} for own in groups]


class _Dealing:
    """Ways to deal layers out."""

    def __init__(self, optimizers: Sequence[WholeOptimizer], params: Mapping[str, TensorRef]) -> None:
        self.params = params
        self.slots = [slots_of(own) for own in optimizers]
        numbers = dict.fromkeys(name.partition(".")[0] for name in params)
        self.layers = [[name for name in params if name.partition(".")[0] == number] for number in numbers]
        self._fitting: dict[tuple[int, int, int], _Names | None] = {}

    def splits(self, stage: int, first: int) -> Iterator[tuple[_Names, ...]]:
        """Names of every group of the stages from `stage` on, which have the layers from `first` on."""
        last = stage == len(self.slots) - 1
        for stop in [len(self.layers)] if last else range(first, len(self.layers) + 1):
            own = self.fitting(stage, first, stop)
            if own is not None:
                yield from ((own, *rest) for rest in ([()] if last else self.splits(stage + 1, stop)))

    def fitting(self, stage: int, first: int, stop: int) -> _Names | None:
        """Names of every group of a stage with the layers `first:stop`; None where its optimizer does not fit them."""
        key = (stage, first, stop)
        if key not in self._fitting:
            names = [name for layer in self.layers[first:stop] for name in layer]
            try:
                self._fitting[key] = match(self.slots[stage], [(n, self.params[n].shape) for n in names]).groups
            except NoMatchError:
                self._fitting[key] = None
        return self._fitting[key]
