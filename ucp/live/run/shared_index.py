"""Rank 0 reads the index of a checkpoint, and sends it to the others.

Reading takes several times as long as unpacking what was sent, and a shared file system would serve the same small
files to every rank. Rank 0 sends an equal part of the packed index to each rank, then all ranks gather all parts: no
rank sends more than twice the size of the index. A rank that does not see the same files at the same path reads the
index itself.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import zstandard

from ucp.conversion.arguments import SourceArguments
from ucp.conversion.option import type_path
from ucp.conversion.options import make_options
from ucp.core.index import Index
from ucp.io.folder import is_url, parse_path
from ucp.io.provenance import size_and_time
from ucp.live.checkpoint import Checkpoint
from ucp.live.run.ranks import Ranks, find_ranks, run_together
from ucp.source.read import index_of

if TYPE_CHECKING:
    import torch


def read_once(ranks: Ranks, path: Path, read: Callable[[], Index]) -> Index:
    """The index that `read` returns for `path`, read by rank 0 for all ranks that see the same files. Collective.

    Raises what `read` raises, on all ranks.
    """
    if ranks.count == 1:
        return run_together(ranks, read)
    index: Index | None = None
    failure: Exception | None = None
    if ranks.rank == 0:
        try:
            index = read()
        except Exception as error:  # noqa: BLE001  # raised below, when the other ranks have tried too
            failure = error
    packed = b"" if index is None else zstandard.compress(pickle.dumps((str(path), index), protocol=5), 1)
    received = _broadcast(ranks, packed)

    def choose() -> Index:
        if failure is not None:
            raise failure
        return index or _unpack(received, path) or read()

    return run_together(ranks, choose)


def open_together(path: type_path, device: torch.device, **options: Unpack[SourceArguments]) -> Checkpoint:
    """What `ucp.open` returns, read by rank 0 for all ranks. Collective. `device`: of the model."""
    ranks = find_ranks(None, device)
    folder, source = run_together(ranks, lambda: (parse_path(path), make_options(**options).source))
    return Checkpoint(read_once(ranks, folder, lambda: index_of(folder, source=source)))


def _unpack(packed: bytes, path: Path) -> Index | None:
    """The index of rank 0; None if it has none, or this rank sees files of other sizes or times."""
    if not packed:
        return None
    rank_0_path, index = pickle.loads(zstandard.decompress(packed))  # noqa: S301  # from a process of the same job
    assert isinstance(index, Index)
    files = [file for file in index.files if not is_url(file.path)]  # every rank sees the same objects
    try:
        sees_same = all(size_and_time(file.path) == (file.nbytes, file.mtime_ns) for file in files)
    except OSError:
        return None
    return index if sees_same and rank_0_path == str(path) else None


def _broadcast(ranks: Ranks, data: bytes) -> bytes:
    """The bytes of rank 0, on every rank."""
    import numpy as np
    import torch

    nbytes = ranks.share(len(data))[0]
    words = -(-nbytes // (8 * ranks.count))
    padded = np.frombuffer(bytearray(data.ljust(8 * words * ranks.count, b"\0") if data else b""), dtype=np.uint64)
    parts = np.split(padded, ranks.count)
    part = torch.from_numpy(ranks.swap(parts)[0].view(np.uint8)).to(ranks.device)
    gathered = part.new_empty((ranks.count, 8 * words))
    ranks.gather(part, gathered, range(ranks.count))
    return gathered.cpu().numpy().tobytes()[:nbytes]
