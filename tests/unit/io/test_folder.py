"""A look into a folder: what is there, and nothing of what cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

import ucp
from ucp.io.folder import is_url, names_in, parse_path, read_short_text
from ucp.io.remote.url import EXTRAS


def test_names_are_those_of_all_entries(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / ".hidden").write_bytes(b"")
    (tmp_path / "astray").symlink_to(tmp_path / "nothing")
    assert set(names_in(tmp_path)) == {"folder", ".hidden", "astray"}


def test_what_is_no_folder_has_no_names(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert list(names_in(tmp_path / "file")) == list(names_in(tmp_path / "nothing")) == []


def test_text_is_without_the_blanks_around_it(tmp_path: Path) -> None:
    (tmp_path / "latest").write_bytes("\n global_step3 \u00e4\r\n".encode())
    assert read_short_text(tmp_path / "latest", most_bytes=64) == "global_step3 \u00e4"


@pytest.mark.parametrize(("nbytes", "text"), [(0, ""), (8, "x" * 8), (9, None)])
def test_text_that_is_too_long_is_none(tmp_path: Path, nbytes: int, text: str | None) -> None:
    (tmp_path / "latest").write_bytes(b"x" * nbytes)
    assert read_short_text(tmp_path / "latest", most_bytes=8) == text


def test_what_is_no_text_is_none(tmp_path: Path) -> None:
    (tmp_path / "latest").write_bytes(b"\xff\xfe")
    assert read_short_text(tmp_path / "latest", most_bytes=64) is None
    assert read_short_text(tmp_path, most_bytes=64) is None
    assert read_short_text(tmp_path / "nothing", most_bytes=64) is None


@pytest.mark.parametrize("word", [*EXTRAS, "file", "s3:", "hf:model", "memory/run"])
def test_a_path_that_is_the_name_of_a_scheme_is_a_path(word: str) -> None:
    path = parse_path(word)
    assert type(path) is type(Path())
    assert str(path) == word
    assert not is_url(str(path))


def test_a_destination_may_have_the_name_of_a_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(__file__).parents[3] / "fixtures/huggingface/llama-sharded/model"
    monkeypatch.chdir(tmp_path)
    for name in ("hf", "s3"):
        ucp.convert(source, name)
        assert (tmp_path / name / "ucp.json").is_file()
        assert ucp.verify(name).ok
