from __future__ import annotations

from pathlib import Path

import pytest

from ucp.conversion.destination.existing import check_destination
from ucp.errors import DestinationError


def test_a_current_folder_that_is_gone_is_in_nobodys_way(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    check_destination(tmp_path / "source", tmp_path / "out")


def test_the_name_of_an_unfinished_folder_is_no_destination(tmp_path: Path) -> None:
    """A conversion to `run` with --overwrite would discard what lies there."""
    with pytest.raises(DestinationError):
        check_destination(tmp_path / "source", tmp_path / "run.ucp-partial")
