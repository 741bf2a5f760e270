"""Objects read as files: any place, whatever was announced, joined and cut as is good for a store."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from ucp.core.index import SourceFile
from ucp.errors import ChangedError, ConnectionLostError, MalformedError, MissingFileError
from ucp.io.files import Sources, open_source
from ucp.io.folder import parse_path
from ucp.io.provenance import check_unchanged, identity_of, source_file
from ucp.io.remote import ends, prefetch
from ucp.io.remote import file as remote_file
from ucp.io.remote.connections import connect
from ucp.io.remote.prefetch import Extent
from ucp.io.remote.stores import Store

URL = "memory://b/x.bin"
LONG = 3 << 20
DATA = np.random.default_rng(7).bytes(LONG)


@pytest.fixture
def reads(memory, monkeypatch):
    """An object, and (first byte, one past the last) of every request for it."""
    asked = []
    fetch = Store.fetch

    def counted(self, url, seen, start, stop):
        asked.append((start, stop))
        return fetch(self, url, seen, start, stop)

    monkeypatch.setattr(Store, "fetch", counted)
    monkeypatch.setattr(remote_file, "REQUEST", 1 << 18)
    monkeypatch.setattr(prefetch, "REQUEST", 1 << 18)
    memory.fs.pipe_file(URL, DATA)
    parse_path(URL)
    ends.clear()
    return asked


@pytest.mark.parametrize("seed", range(8))
def test_any_reads_give_the_bytes_that_are_there(reads, seed):
    chance = random.Random(seed)
    with open_source(URL) as file:
        assert file.nbytes == LONG
        for _ in range(60):
            low = chance.randrange(LONG)
            nbytes = min(chance.choice((0, 1, 100, 1 << 14, 1 << 17, 1 << 20)), LONG - low)
            if chance.random() < 0.5:
                assert file.read(low, nbytes) == DATA[low : low + nbytes]
                continue
            views = [memoryview(bytearray(n)) for n in (nbytes // 3, nbytes - nbytes // 3)]
            file.read_into(views, low)
            assert b"".join(views) == DATA[low : low + nbytes]


@pytest.mark.parametrize("seed", range(8))
def test_announced_or_not_it_reads_the_same(reads, seed, monkeypatch):
    monkeypatch.setattr(prefetch, "BUDGET", 1 << 20)
    chance = random.Random(seed)
    sources = Sources()
    for batch in range(1, 6):
        cuts = sorted(chance.randrange(LONG) for _ in range(30))
        wanted = [(low, high) for low, high in pairwise(cuts) if chance.random() < 0.7]
        sources.prefetch((Extent(URL, low, high, high - low) for low, high in wanted), batch=batch)
        chance.shuffle(wanted)
        for low, high in (*wanted[: chance.randrange(len(wanted))], (5, 500)):
            view = memoryview(bytearray(high - low))
            sources.get(URL).read_into([view], low)
            assert bytes(view) == DATA[low:high]
        sources.cancel(batch=batch)
    sources.close()
    assert sources._prefetcher._nbytes == 0
    assert not sources._prefetcher._files


def test_what_is_announced_is_joined_read_once_and_bounded(reads, monkeypatch):
    monkeypatch.setattr(prefetch, "BUDGET", 1 << 20)
    sources = Sources()
    extents = [Extent(URL, low, low + 1000, 1000) for low in range(0, LONG, 1100) if low + 1000 <= LONG]
    sources.prefetch(extents, batch=1)
    assert sum(stop - start for start, stop in reads) <= prefetch.BUDGET
    for own in extents:
        assert sources.get(URL).read(own.start, 1000) == DATA[own.start : own.stop]
        assert sources._prefetcher._nbytes <= prefetch.BUDGET
    assert len(reads) <= 18, "a few for every announced MiB"
    assert sum(stop - start for start, stop in reads) <= LONG, "nothing twice"


def test_runs_that_are_near_are_one_request(reads):
    buffer = memoryview(bytearray(100 * 64))
    starts = [1000 * n for n in range(100)]
    open_source(URL).read_runs(buffer, starts)
    assert bytes(buffer) == b"".join(DATA[start : start + 64] for start in starts)
    assert len(reads) == 1
    backwards = memoryview(bytearray(3 * 64))
    open_source(URL).read_runs(backwards, [2 << 20, 1 << 20, 0])
    assert bytes(backwards) == b"".join(DATA[start : start + 64] for start in (2 << 20, 1 << 20, 0))


def test_small_reads_at_both_ends_are_two_requests(reads):
    with open_source(URL) as file:
        for at in (0, 8, 4000, LONG - 22, LONG - 4096, LONG - 1):
            assert file.read(at, 1) == DATA[at : at + 1]
    assert sorted(reads) == sorted(ends.end_ranges(LONG))


def test_ends_of_the_next_files_are_on_their_way(memory, monkeypatch):
    urls = [f"memory://b/run/rank{n}.pt" for n in range(40)]
    for url in urls:
        memory.fs.pipe_file(url, DATA[: 600 << 10])
    parse_path("memory://b/run")
    ends.clear()
    begun = []
    submit = Store.submit
    monkeypatch.setattr(
        Store, "submit", lambda self, call, *rest: begun.extend({*rest[:1]} & {*urls}) or submit(self, call, *rest)
    )
    for number, url in enumerate(urls):
        with open_source(url) as file:
            file.read(0, 4)
            file.read(file.nbytes - 4, 4)
        if number == 1:
            assert set(begun) >= set(urls[:6])
    assert sorted(begun) == sorted(urls * 2), "both ends of each, once"


def test_a_split_object_reads_as_the_whole(memory):
    for number, part in enumerate((DATA[:1000], DATA[1000:1001], DATA[1001:5000])):
        memory.fs.pipe_file(f"memory://b/split/x.pt-{number}.3", part)
    parse_path("memory://b/split")
    with open_source("memory://b/split/x.pt") as file:
        assert file.read(0, 5000) == DATA[:5000]
        assert file.read(999, 3) == DATA[999:1002]
    memory.fs.rm("memory://b/split/x.pt-1.3")
    parse_path("memory://b/split")
    with pytest.raises(MissingFileError, match=r"\n  memory://b/split/x\.pt-1\.3"):
        open_source("memory://b/split/x.pt")


def test_outside_the_object(reads):
    with open_source(URL) as file, pytest.raises(MalformedError, match=f"2 bytes at {LONG - 1}; .*{LONG}"):
        file.read(LONG - 1, 2)
    with pytest.raises(MissingFileError, match="memory://b/no"):
        open_source("memory://b/no")
    with pytest.raises(MalformedError, match=r"folder .*memory://b$"):
        open_source("memory://b")


def test_a_short_answer_is_no_answer(memory, monkeypatch):
    memory.fs.pipe_file(URL, DATA)
    parse_path(URL)
    ends.clear()
    monkeypatch.setattr(connect(URL).fs, "cat_file", lambda *_, **__: b"short")
    with pytest.raises(ConnectionLostError, match=f"{LONG} bytes .* 5\\. "):
        open_source(URL).read(0, LONG)


def test_replaced_between_index_and_read(memory):
    memory.fs.pipe_file(URL, DATA)
    parse_path(URL)
    listed = source_file(URL, "weights")
    check_unchanged([listed])
    memory.fs.pipe_file(URL, DATA[:-1] + b"?")
    with pytest.raises(ChangedError, match=rf"\n  {URL}\n"):
        check_unchanged([listed])
    memory.fs.rm(URL)
    with pytest.raises(ChangedError, match=rf"\n  {URL}\n"):
        check_unchanged([listed])


def test_a_listed_version_is_the_only_one_read(memory):
    memory.fs.pipe_file(URL, DATA)
    parse_path(URL)
    listed = SourceFile(path=URL, nbytes=LONG, mtime_ns=0, role="", version="another")
    with pytest.raises(ChangedError, match=f"{URL} .*replaced"):
        Sources([listed]).get(URL)


def test_identity_of_an_object_without_versions_is_of_its_ends(memory, tmp_path):
    (tmp_path / "x").write_bytes(DATA)
    memory.fs.pipe_file(URL, DATA)
    parse_path(URL)
    assert identity_of(URL) == identity_of(str(tmp_path / "x"))
