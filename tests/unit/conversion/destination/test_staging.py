from __future__ import annotations

import os
from importlib import import_module

import numpy as np
import pytest

import ucp
from ucp.conversion.destination.existing import ConversionId
from ucp.conversion.destination.staging import Staging
from ucp.errors import BusyError, DestinationError, IncompleteError
from ucp.io.folder import MARK, refuse_partial
from ucp.io.provenance import is_complete
from ucp.testing.handmade import Shards, make_index, write_checkpoint


@pytest.fixture
def staging(tmp_path):
    staging = Staging(tmp_path / "out")
    yield staging
    staging.release()


def begun(staging, *, fingerprint="f", resume=False, overwrite=False, **facts):
    return staging.open(ConversionId(fingerprint, facts), resume=resume, overwrite=overwrite)


def test_everything_is_on_disk_before_it_is_in_place(staging, monkeypatch):
    """Files, then the folders that name them, then the rename, then the folder that it changed."""
    events: list[str] = []
    real = os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(os.readlink(f"/proc/self/fd/{fd}")))
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append("rename"), real(a, b)))
    begun(staging)
    (staging.data / "packs").mkdir()
    (staging.data / "packs" / "0").write_text("x")
    (staging.data / "ucp.json").write_text("{}")
    staging.commit()
    before = {str(staging.data / name) for name in ("packs/0", "ucp.json", "packs", ".")}
    at = events.index("rename")
    assert {os.path.normpath(event) for event in events[:at]} == {os.path.normpath(path) for path in before}
    assert events[at + 1 :] == [str(staging.dst.parent)]
    assert (staging.dst / "packs" / "0").read_text() == "x"
    assert not staging.folder.exists()


def test_a_journal_without_data_starts_over(staging):
    begun(staging)
    staging.note({"task": 1})
    staging.release()
    staging.data.rmdir()
    assert begun(staging, resume=True) == []


def test_what_was_begun_otherwise_says_how(staging):
    begun(staging, source="/a", target="ucp")
    staging.release()
    with pytest.raises(DestinationError) as caught:
        begun(staging, fingerprint="g", resume=True, source="/a", target="deepspeed", topology="dp=2")
    said = str(caught.value)
    assert "target: ucp then, deepspeed now" in said
    assert "topology: by default then, dp=2 now" in said
    assert "source:" not in said
    with pytest.raises(DestinationError, match="than then"):
        begun(staging, fingerprint="g", resume=True, source="/a", target="ucp")


def test_a_conversion_that_runs_is_not_called_unfinished(staging, tmp_path, monkeypatch):
    monkeypatch.setattr(import_module("ucp.conversion.destination.staging"), "_MOMENT", 0.1)
    begun(staging)
    with pytest.raises(BusyError, match=rf"process {os.getpid()} on ") as caught:
        begun(Staging(tmp_path / "out"))
    assert "--overwrite" not in str(caught.value)
    assert "--resume" not in str(caught.value)
    staging.release()
    with pytest.raises(DestinationError, match=r"unfinished conversion.*--resume.*--overwrite"):
        begun(Staging(tmp_path / "out"))


def test_a_lock_that_names_nobody(staging, tmp_path, monkeypatch):
    monkeypatch.setattr(import_module("ucp.conversion.destination.staging"), "_PATIENCE", 0.1)
    begun(staging)
    for text in ("", "{", "[]", "{}"):
        (staging.folder / "lock").write_text(text)
        with pytest.raises(BusyError, match="no name"):
            begun(Staging(tmp_path / "out"), resume=True)


def test_a_lock_on_what_was_removed_is_none(staging, tmp_path, monkeypatch):
    """The run before removes its place while the next waits for the lock in it."""
    begun(staging)
    other = Staging(tmp_path / "out")
    real = os.stat
    removed = []

    def vanishing(path, *args, **more):
        if str(path).endswith("lock") and not removed:
            removed.append(path)
            staging.discard()
        return real(path, *args, **more)

    staging.release()
    monkeypatch.setattr(os, "stat", vanishing)
    begun(other, resume=True)
    assert removed
    assert other.data.is_dir()
    other.release()


def test_a_place_that_vanishes_is_made_again(staging, monkeypatch):
    real = os.open
    vanished = []

    def vanishing(path, *args, **more):
        if str(path).endswith("lock") and not vanished:
            vanished.append(path)
            staging.folder.rmdir()
        return real(path, *args, **more)

    monkeypatch.setattr(os, "open", vanishing)
    begun(staging)
    assert vanished


@pytest.mark.parametrize("text", [None, '{"fingerprint": "g", "files": {"ucp-conversion.json": null}}'])
def test_only_the_same_conversion_is_complete(staging, text):
    staging.dst.mkdir()
    if text is not None:
        (staging.dst / MARK).write_text(text)
    assert not is_complete(staging.dst, "f")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"fingerprint": "f"}',
        '{"fingerprint": 1}',
        "{",
        "\ud800",
        '{"fingerprint": "f","xxh3":"0123456789abcdef"}',
    ],
)
def test_a_damaged_mark_is_neither_believed_nor_replaced(staging, text):
    staging.dst.mkdir()
    (staging.dst / MARK).write_text(text, errors="surrogatepass")
    with pytest.raises(DestinationError, match=f"{MARK} is damaged"):
        is_complete(staging.dst, "f")
    with pytest.raises(DestinationError, match=f"{MARK} is damaged"):
        begun(staging, overwrite=True)


def test_what_grows_is_refused_from_inside(staging):
    begun(staging)
    for path in (staging.folder, staging.data, staging.data / "packs" / "0"):
        with pytest.raises(IncompleteError, match="--resume"):
            refuse_partial(path)
    refuse_partial(staging.dst)


class TestLinks:
    """What a conversion writes to and clears is never somewhere else."""

    @pytest.fixture
    def elsewhere(self, tmp_path):
        """A folder that looks like one in which a conversion grew."""
        (tmp_path / "elsewhere" / "data").mkdir(parents=True)
        (tmp_path / "elsewhere" / "data" / "precious").write_text("kept")
        (tmp_path / "elsewhere" / "journal.jsonl").write_text('{"fingerprint":"f"}\n{"task":1}\n')
        return tmp_path / "elsewhere"

    @pytest.mark.parametrize("how", [{"overwrite": True}, {"resume": True}, {}], ids=str)
    @pytest.mark.parametrize("place", ["", "data", "journal.jsonl", "lock", "old-1", "data/packs"])
    def test_they_are_refused(self, staging, elsewhere, place, how):
        target = elsewhere / "data" if place in ("data", "old-1", "data/packs") else elsewhere / place
        if place == "lock":
            target.write_text("")
        link = staging.folder / place
        if place:
            staging.data.mkdir(parents=True)
            (staging.folder / "journal.jsonl").write_text('{"fingerprint":"f"}\n{"task":1}\n')
        if link.is_dir():
            link.rmdir()
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        before = {path: path.is_file() and path.read_text() for path in sorted(elsewhere.rglob("*"))}
        with pytest.raises(DestinationError, match=f"link in {staging.folder}"):
            begun(staging, **how)
        assert {path: path.is_file() and path.read_text() for path in sorted(elsewhere.rglob("*"))} == before
        assert link.is_symlink()

    def test_what_a_complete_destination_has_beside_it_is_left_alone(self, staging, elsewhere):
        staging.folder.symlink_to(elsewhere)
        staging.cleanup()
        assert (elsewhere / "data" / "precious").exists()
        assert not (elsewhere / "lock").exists()

    def test_one_that_takes_the_place_of_the_folder_is_not_followed(self, staging, elsewhere, monkeypatch):
        """Put there after everything was looked at."""
        real = Staging._read_journal

        def late(own):
            lines = real(own)
            os.rename(own.folder, own.folder.with_name("away"))
            own.folder.symlink_to(elsewhere)
            return lines

        monkeypatch.setattr(Staging, "_read_journal", late)
        staging.folder.mkdir()
        (staging.folder / "journal.jsonl").write_text("")
        with pytest.raises(OSError, match=r"out\.ucp-partial"):
            begun(staging, resume=True)
        assert (elsewhere / "data" / "precious").read_text() == "kept"

    def test_a_destination_that_is_a_link_is_made_where_it_leads(self, tmp_path):
        (tmp_path / "disk").mkdir()
        (tmp_path / "out").symlink_to(tmp_path / "disk" / "out")
        shards = Shards(tmp_path / "source")
        write_checkpoint(make_index(shards.folder, {("w", "weight"): shards.whole(np.zeros(3, "float32"))}))
        for _ in range(2):
            ucp.convert(shards.folder, tmp_path / "out", workers=1, overwrite=True)
            assert (tmp_path / "out").is_symlink()
            assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["out"]
