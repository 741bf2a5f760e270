"""One rank reads the index of a checkpoint, and the others get it from that rank.

Reading takes several times as long as unpacking what was read, and a shared file system would serve the same small
files to every rank.

1. rank 0 reads the index and packs it;
2. each rank gets a part of the packed index, and all gather the parts: no rank sends more than the index twice;
3. a rank that does not see the same files at the same path reads for itself.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import zstandard

from ucp.core.index import Index
from ucp.io.folder import is_url
from ucp.io.provenance import size_and_time
from ucp.live.run.ranks import Ranks, run_together


def read_once(ranks: Ranks, path: Path, read: Callable[[], Index]) -> Index:
    """The index that `read` gives for `path`, read by rank 0 for all ranks that see the same files. Collective.

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

    def result() -> Index:
        if failure is not None:
            raise failure
        return index or _unpack(received, path) or read()

    return run_together(ranks, result)


def _unpack(packed: bytes, path: Path) -> Index | None:
    """The index of rank 0; None where it has none, or this rank sees other files."""
    if not packed:
        return None
    rank_0_path, index = pickle.loads(zstandard.decompress(packed))  # noqa: S301  # of a process of the same job
    assert isinstance(index, Index)
    return index if rank_0_path == str(path) and _sees_files_of(index) else None


def _sees_files_of(index: Index) -> bool:
    """Whether files of disks are there with the sizes and times that the index lists; objects of stores are alike."""
    try:
        return all(
            is_url(file.path) or size_and_time(file.path) == (file.nbytes, file.mtime_ns) for file in index.files
        )
    except OSError:
        return False


def _broadcast(ranks: Ranks, data: bytes) -> bytes:
    """The bytes of rank 0, on every rank; they are taken round in equal parts, as `Ranks.gather` does."""
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
