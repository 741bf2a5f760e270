"""Which folder holds the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from ucp.contract.locating import Located, Pointer, locate, require_checkpoint
from ucp.contract.registry import is_owned_by_another
from ucp.errors import MalformedError, UnknownFormatError, UsageError

NEWEST = Pointer("newest")


def look(path: Path) -> Located[str] | None:
    return Located(root=path, content=path.name, reasons=("a file x",)) if (path / "x").is_file() else None


@pytest.fixture
def runs(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").touch()
    return tmp_path


def find(path: Path) -> Located[str]:
    return require_checkpoint(locate(path, look, (NEWEST,)), path, "a checkpoint", "a folder with x", "newest")


def test_a_pointer_is_followed_and_says_what_was_saved_last(runs):
    (runs / "newest").write_text("b\n")
    located = find(runs)
    assert (located.content, located.reasons) == ("b", ("newest -> b", "a file x"))
    assert (located.saved_in.path, located.saved_in.newest) == (runs, "")
    assert find(runs / "a").saved_in.newest == "b"


@pytest.mark.parametrize("text", ["c", "", "../a", "/a", "x" * 300, "x" * 2000, "a\0"])
def test_a_pointer_to_nothing_is_an_error_that_lists_what_is_there(runs, text):
    (runs / "newest").write_text(text)
    with pytest.raises(MalformedError) as caught:
        find(runs)
    assert str(runs / "a") in str(caught.value)


def test_of_several_the_user_chooses_and_the_only_one_is_taken(runs):
    with pytest.raises(UsageError) as caught:
        find(runs)
    assert all(str(runs / name) in str(caught.value) for name in ("a", "b"))
    (runs / "b" / "x").unlink()
    assert find(runs).root == runs / "a"
    (runs / "a" / "x").unlink()
    with pytest.raises(UnknownFormatError):
        find(runs)


def test_a_format_leaves_files_of_another_alone():
    assert is_owned_by_another("mp_rank_00_model_states.pt", "torch")
    assert is_owned_by_another("metadata.json", "dcp")
    assert not is_owned_by_another("metadata.json", "megatron")
    assert not is_owned_by_another("checkpoint.pt", "dcp")
