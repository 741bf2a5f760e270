"""A store that is far away: requests overlap, nothing is read in vain, and memory stays bounded.

What is counted are requests and bytes under way, as seen by the proxy; the time is only held against a wide bound, as
other work may run on this machine.
"""

from __future__ import annotations

import time
import warnings

import pytest
import torch
from torch.distributed import checkpoint as dcp

import ucp
from ucp.io.remote import prefetch

pytestmark = pytest.mark.integration

LATENCY = 0.05
BANDWIDTH = 30e6
COUNT, ROWS = 12, 1 << 10


@pytest.fixture(scope="module")
def source(tmp_path_factory, bucket):
    """48 MB in one file of DCP, and its URL."""
    folder = tmp_path_factory.mktemp("far") / "checkpoint"
    torch.manual_seed(0)
    state = {f"layers.{n}.weight": torch.randn(ROWS, 1 << 10) for n in range(COUNT)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return folder, bucket.put(folder, "runs/far")


@pytest.fixture
def far(source, bucket, proxy):
    """The proxy, which answers reads itself: slowly, all together no faster than the bandwidth."""
    proxy.behaviour.objects = bucket.objects("runs/far")
    proxy.behaviour.latency, proxy.behaviour.bandwidth = LATENCY, BANDWIDTH
    return proxy


def most_at_once(reads, weight):
    """Most that was under way at any time: requests, or bytes that were asked for and had not all come."""
    moves = [move for own in reads for move in ((own.began, weight(own)), (own.ended, -weight(own)))]
    most = now = 0
    for _, step in sorted(moves):
        now += step
        most = max(most, now)
    return most


@pytest.mark.parametrize("workers", [1, 2])
def test_reads_overlap_and_are_made_once(source, far, tmp_path, workers):
    folder, url = source
    nbytes = sum(own.stat().st_size for own in folder.rglob("*"))
    began = time.monotonic()
    ucp.convert(url, tmp_path / "out", workers=workers, fsync=False)
    seconds = time.monotonic() - began
    assert ucp.diff(tmp_path / "out", folder, extras=True).equal
    reads = [own for own in far.behaviour.seen if own.is_read and own.began < began + seconds]
    large = [own for own in reads if own.nbytes > 1 << 20]
    assert sum(own.nbytes for own in reads) < 1.05 * nbytes, "what lies between tensors, and the index twice at most"
    assert sum(own.nbytes for own in large) > 0.9 * nbytes
    assert sum(own.nbytes for own in large) / len(large) >= 3 << 20, "requests of some MiB"
    spent = max(own.ended for own in large) - min(own.began for own in large)
    assert sum(own.ended - own.began for own in large) / spent > 3, "requests under way at once, on average"
    assert most_at_once(reads, lambda own: own.nbytes) <= 2 * workers * prefetch.BUDGET
    assert spent < 1.3 * nbytes / BANDWIDTH + 0.5


def test_the_index_is_read_side_by_side(source, far):
    _, url = source
    ucp.inspect(url)
    reads = [own for own in far.behaviour.seen if own.is_read]
    assert most_at_once(reads, lambda own: 1) >= 6


def test_what_is_compared_is_read_side_by_side(source, far):
    folder, url = source
    assert ucp.diff(url, folder).equal
    large = [own for own in far.behaviour.seen if own.is_read and own.nbytes > 1 << 20]
    assert most_at_once(large, lambda own: 1) >= 4
