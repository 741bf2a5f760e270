"""The model of a legacy checkpoint as its ranks store it: names of the files, no family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ucp.contract.protocols import LocalTensor, LocalTensors
from ucp.core.tensor import TensorRef
from ucp.io.pickle.fields import flattened
from ucp_formats.megatron.legacy.files import SavedRank, read_run
from ucp_formats.megatron.locate import Located

__all__ = ["read_local"]


def read_local(located: Located) -> LocalTensors:
    """Tensors of every chunk of every rank. Raises SourceError."""
    run = read_run(located.root)
    tensors = tuple(own for rank in run.ranks for own in _of_rank(rank))
    return LocalTensors(arguments=run.arguments.raw, tensors=tensors)


def _of_rank(rank: SavedRank) -> Iterator[LocalTensor]:
    place = rank.place
    for chunk, saved in rank.chunks:
        coords = {"tp": place.tp, "pp": place.pp, "ep": place.ep, "chunk": chunk}
        for name, value in flattened(saved) if isinstance(saved, Mapping) else ():
            if isinstance(value, TensorRef) and not name.endswith("_extra_state"):
                yield LocalTensor(name=name, coords=coords, ref=value)
