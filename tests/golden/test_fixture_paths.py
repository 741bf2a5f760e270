"""No kept fixture names a folder of the machine it was made on."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ucp.io.dcp.metadata import read_metadata

FIXTURES = Path(__file__).parents[2] / "fixtures"
KEPT = sorted(folder for folder in FIXTURES.iterdir() if folder.is_dir() and folder.name not in ("__pycache__", "make"))
SAVED = sorted((FIXTURES / "megatron").glob("*/checkpoint/iter_*/.metadata"))

HOMES = b"home|root|Users|tmp|var|usr|opt|mnt|media|srv|private|work|workspace|scratch|content|nix|run|proc"
MACHINE = re.compile(rb"/(?:" + HOMES + rb")/[ -~]*|pathlib")
"""An absolute path below the usual homes; or a pickled path object, whose parts would hide from that."""


def paths(name: str, content: bytes) -> Iterator[str]:
    """What of `MACHINE` is in `content` of the file `name`, or compressed in it.

    Stored members of a zip file lie in it as they are, pickled strings too: only compressed members are hidden.
    """
    for found in MACHINE.finditer(content):
        yield f"{name}: {found.group().decode()}"
    if content.startswith(b"PK\x03\x04"):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for member in archive.infolist():
                if member.compress_type != zipfile.ZIP_STORED:
                    yield from paths(f"{name}!{member.filename}", archive.read(member))


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
def test_no_machine_path(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]

    found = [line for path in files for line in paths(str(path.relative_to(FIXTURES)), path.read_bytes())]
    found = [line for line in found if not line.endswith(".metadata: pathlib") or folder.name != "torch"]  # see below

    assert files
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.parents[2].name)
def test_torch_dist_was_saved_to_a_relative_folder(path):
    recorded = read_metadata(str(path)).facts["storage_meta"].state["checkpoint_id"]

    assert recorded == f"checkpoint/{path.parent.name}"


@pytest.mark.parametrize(
    "path", sorted((FIXTURES / "torch").rglob("*.metadata")), ids=lambda path: path.parents[1].name
)
def test_torch_saved_to_a_relative_folder(path):
    recorded = read_metadata(str(path)).facts.get("storage_meta")

    assert recorded is not None or path.parents[1].name < "2.4"  # where torch recorded none
    assert recorded is None or recorded.state["checkpoint_id"].args == ("checkpoint",)
