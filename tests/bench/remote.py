"""`python -m tests.bench --case remote`: convert out of a bucket behind a link of known bandwidth and latency.

The floor is bytes / bandwidth; what a whole process of `ucp convert` takes beyond it is its start, the reading of the
index, and what of the link stood idle. The server is moto's; a proxy on this machine has the bandwidth and the latency.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

from tests.integration.storage.proxy import Proxy
from tests.integration.storage.servers import S3, running

COUNT = 64
"""Tensors of 4 MiB."""
LINKS = ((100e6, 0.03), (40e6, 0.1))
"""Bytes a second, and seconds before each answer."""


def main(repeats: int) -> None:
    """Print a line for each link and number of workers."""
    with tempfile.TemporaryDirectory() as work, running(S3) as port:
        bucket, proxy = S3(f"http://127.0.0.1:{port}"), Proxy(port)
        url, nbytes = bucket.put(_source(Path(work)), "bench"), COUNT << 22
        objects = bucket.objects("bench")
        for bandwidth, latency in LINKS:
            for workers in (1, 2):
                runs = []
                for _ in range(repeats):
                    proxy.reset()
                    proxy.behaviour.objects = objects
                    proxy.behaviour.bandwidth, proxy.behaviour.latency = bandwidth, latency
                    seconds = _converted(url, Path(work), proxy.url, workers)
                    runs.append((seconds, proxy.behaviour.seen))
                seconds, seen = sorted(runs, key=lambda own: own[0])[repeats // 2]
                large = [own for own in seen if own.is_read and own.nbytes > 1 << 20]
                moved = max(own.ended for own in large) - min(own.began for own in large)
                floor, got = nbytes / bandwidth, sum(own.nbytes for own in seen)
                print(
                    f"{bandwidth / 1e6:.0f} MB/s, {latency * 1e3:.0f} ms, {workers} workers: {nbytes / 1e6:.0f} MB in "
                    f"{seconds:.2f} s, of which {moved:.2f} s of reading tensors, {moved / floor:.2f} x the floor of "
                    f"{floor:.2f} s; {len(large)} large requests of {len(seen)}, {got / nbytes:.3f} x the bytes"
                )


def _source(work: Path) -> Path:
    import torch
    from torch.distributed import checkpoint as dcp

    state = {f"layers.{n}.weight": torch.randn(1 << 10, 1 << 10) for n in range(COUNT)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(work / "source"), no_dist=True)
    return work / "source"


def _converted(url: str, work: Path, endpoint: str, workers: int) -> float:
    """Seconds of a conversion; what it wrote is removed."""
    began = time.monotonic()
    command = ["convert", url, str(work / "out"), "--no-fsync", "--workers", str(workers), "--overwrite", "--quiet"]
    subprocess.run([sys.executable, "-m", "ucp", *command], check=True, env=os.environ | {"AWS_ENDPOINT_URL": endpoint})
    return time.monotonic() - began
