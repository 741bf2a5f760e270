"""Tests that every format passes, on checkpoints of that format and on other folders."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from ucp.contract.protocols import Format
from ucp.core.gaps import check_cover
from ucp.core.index import WEIGHT, Index
from ucp.core.slices import Locator, block_ranges, resolve
from ucp.core.target import full_slice
from ucp.core.tensor import TensorRef
from ucp.errors import UcpError
from ucp.io.files import Sources
from ucp.store.values import to_json
from ucp.transfer.gather import Gatherer
from ucp.transfer.plan.tasks import BLOCK

_CHECKPOINTS = pytest.StashKey[Sequence[Path]]()
_INDEXES = pytest.StashKey[Sequence[Index]]()


class FormatContract:
    """Override `make` and `paths`; every test runs on each checkpoint.

    `paths` is called once for all tests of a class, and its checkpoints are indexed once: no test changes them.
    """

    def make(self) -> Format:
        """A new format."""
        raise NotImplementedError

    def paths(self, folder: Path) -> Sequence[Path]:
        """Checkpoints of the format: existing ones, or ones made below `folder`, which is empty."""
        raise NotImplementedError

    @pytest.fixture
    def checkpoints(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
        """What `paths` returns."""
        stash = class_stash(request)
        if _CHECKPOINTS not in stash:
            stash[_CHECKPOINTS] = self.paths(tmp_path_factory.mktemp("checkpoints"))
        return stash[_CHECKPOINTS]

    @pytest.fixture
    def indexes(self, request: pytest.FixtureRequest, checkpoints: Sequence[Path]) -> Sequence[Index]:
        """The indexes of `checkpoints`."""
        stash = class_stash(request)
        if _INDEXES not in stash:
            stash[_INDEXES] = [self.make().read(path) for path in checkpoints]
        return stash[_INDEXES]

    def test_its_own_are_recognised(self, checkpoints: Sequence[Path]) -> None:
        """With evidence, and with a root that exists."""
        assert checkpoints
        for path in checkpoints:
            evidence = self.make().detect(path)
            assert evidence is not None
            assert evidence.reasons
            assert evidence.root.exists()

    def test_others_are_not_recognised(self, tmp_path: Path) -> None:
        """An empty folder, a folder with a text file, a text file, and a missing path."""
        (tmp_path / "empty").mkdir()
        (tmp_path / "texts").mkdir()
        (tmp_path / "texts" / "notes.txt").write_text("hello")
        for path in ("empty", "texts", "texts/notes.txt", "nothing"):
            assert self.make().detect(tmp_path / path) is None

    def test_pieces_tile_every_state(self, indexes: Sequence[Index]) -> None:
        """`check_cover` finds neither gaps nor overlaps."""
        for index in indexes:
            check_cover(index)

    def test_the_index_names_itself(self, indexes: Sequence[Index]) -> None:
        """It has the format's name, evidence and an absolute path."""
        for index in indexes:
            assert index.format == self.make().name
            assert index.evidence
            assert Path(index.path).is_absolute()

    def test_atoms_are_whole(self, indexes: Sequence[Index]) -> None:
        """Every atom has the name that it is listed under, and a weight with the atom's shape."""
        for index in indexes:
            for name, atom in index.atoms.items():
                assert atom.name == name
                assert atom.states[WEIGHT].global_shape == atom.global_shape

    def test_references_lie_in_files_that_are_listed(self, indexes: Sequence[Index]) -> None:
        """Paths are absolute, and no reference goes past the end of its file."""
        for index in indexes:
            nbytes = {file.path: file.nbytes for file in index.files}
            for _, _, state in index.states():
                for fragment in state.fragments:
                    if isinstance(fragment.ref, TensorRef) and fragment.ref.numel:
                        used = fragment.ref.codec_nbytes or fragment.ref.extent
                        assert Path(fragment.ref.path).is_absolute()
                        assert fragment.ref.offset + used <= nbytes[fragment.ref.path]

    def test_checksums_lie_in_files_that_are_listed(self, indexes: Sequence[Index]) -> None:
        """Ranges with checksums do not go past the end of a file, and do not overlap."""
        for index in indexes:
            nbytes = {file.path: file.nbytes for file in index.files}
            before = ("", 0)
            for path, offset, length in sorted((r.path, r.offset, r.nbytes) for r in index.records):
                assert offset + length <= nbytes[path]
                assert path != before[0] or offset >= before[1]
                before = (path, offset + length)

    def test_names_refer_to_atoms(self, indexes: Sequence[Index]) -> None:
        """Groups and aliases name existing atoms; no parameter is in two groups."""
        for index in indexes:
            grouped = [name for group in index.groups for name in group.params]
            assert set(grouped) <= set(index.atoms)
            assert len(grouped) == len(set(grouped))
            assert set(index.aliases.values()) <= set(index.atoms)
            assert not set(index.aliases) & set(index.atoms)

    def test_hyper_parameters_are_plain(self, indexes: Sequence[Index]) -> None:
        """They can be encoded as JSON."""
        for index in indexes:
            for group in index.groups:
                to_json(dict(group.hyper))

    def test_extras_are_told_apart(self, indexes: Sequence[Index]) -> None:
        """No two extras have the same name and rank."""
        for index in indexes:
            labels = [(extra.name, extra.rank) for extra in index.extras]
            assert len(labels) == len(set(labels))

    def test_an_index_travels(self, indexes: Sequence[Index]) -> None:
        """It can be pickled for another process."""
        for index in indexes:
            copy = pickle.loads(pickle.dumps(index))  # noqa: S301  # our own bytes
            assert copy.atoms == index.atoms
            assert copy.records == index.records

    def test_reading_twice_gives_the_same(self, checkpoints: Sequence[Path], indexes: Sequence[Index]) -> None:
        """An index depends on nothing but the checkpoint."""
        for path, first in zip(checkpoints, indexes, strict=True):
            second = self.make().read(path)
            assert first.atoms == second.atoms
            assert list(first.atoms) == list(second.atoms)
            assert (first.groups, first.files, first.records) == (second.groups, second.files, second.records)

    def test_the_source_is_left_alone(self, checkpoints: Sequence[Path]) -> None:
        """Reading changes no byte, name or modification time of it."""
        for path in checkpoints:
            before = _look(path)
            self.make().read(path)
            assert _look(path) == before

    def test_every_element_can_be_read(self, indexes: Sequence[Index]) -> None:
        """The references of every state can be resolved and read."""
        for index in indexes:
            gatherer = Gatherer(sources=Sources())
            for atom, name, state in index.states():
                target, locator = full_slice(atom.name, name, state), Locator(state)
                for low, high in block_ranges(0, target.stop, BLOCK // target.dtype.itemsize):
                    data = memoryview(bytearray((high - low) * target.dtype.itemsize))
                    gatherer.fill(data, target.dtype, resolve(target, locator, low, high))
            gatherer.sources.close()

    def test_a_file_cut_short_is_an_expected_error(self, checkpoints: Sequence[Path], tmp_path: Path) -> None:
        """For any file: reading either raises a UcpError or does not need the file."""
        for number, path in enumerate(checkpoints):
            copy = _copied(path, tmp_path / f"cut-{number}-{path.name}")
            for file in sorted(_files(path)):
                victim, data = copy / file.relative_to(path) if path.is_dir() else copy, file.read_bytes()
                victim.write_bytes(data[: len(data) // 2])
                with contextlib.suppress(UcpError):
                    check_cover(self.make().read(copy))
                victim.write_bytes(data)


def class_stash(request: pytest.FixtureRequest) -> pytest.Stash:
    """A stash that the tests of a class share."""
    test_class = request.node.getparent(pytest.Class)
    assert test_class is not None
    return cast("pytest.Stash", test_class.stash)  # `node` is untyped in pytest


def _files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


def _look(path: Path) -> dict[str, tuple[int, bytes]]:
    return {str(file): (file.stat().st_mtime_ns, file.read_bytes()) for file in _files(path)}


def _copied(path: Path, to: Path) -> Path:
    for file in _files(path):
        goal = to / file.relative_to(path) if path.is_dir() else to
        goal.parent.mkdir(parents=True, exist_ok=True)
        goal.write_bytes(file.read_bytes())
    return to
