"""Shapes that a user points to, in what is no regular file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ucp_formats.torch.files.weights import shapes_from

from ucp.errors import MalformedError, MissingFileError


def test_a_document_that_is_no_regular_file_is_refused_unread(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "endless.json").symlink_to("/dev/zero")
    for name in ("pipe.json", "endless.json"):
        with pytest.raises(MalformedError, match=name):
            shapes_from(tmp_path / name)


def test_a_document_that_is_not_there_is_missing(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"shapes\.json"):
        shapes_from(tmp_path / "shapes.json")
