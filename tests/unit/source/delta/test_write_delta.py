"""Deltas that `ucp delta` writes: read back bit for bit, from any format, and nothing half-written looks whole."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import zstandard
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import ucp
from ucp.core.index import ParamGroup, StateIndex
from ucp.errors import CorruptError, DestinationError, MalformedError, MisfitError, UsageError
from ucp.testing.handmade import Shards, inline, make_index, write_checkpoint
from ucp_cli.verbs import cli

INDEX = "model.safetensors.index.json"
STATES = ("weight", "exp_avg", "exp_avg_sq")
Arrays = dict[tuple[str, str], NDArray[np.generic]]


def make_run(seed: int, before: Arrays | None = None) -> Arrays:
    """A run's states; if it goes on from `before`, the norm's are unchanged."""
    rng = np.random.default_rng(seed)
    shapes = {"layers.0.w": (40, 30), "layers.0.norm": (30,)}
    arrays = {(name, state): rng.normal(size=shape).astype("f4") for name, shape in shapes.items() for state in STATES}
    for key in () if before is None else before:
        if key[0] == "layers.0.norm":
            arrays[key] = before[key]  # type: ignore[index]  # mypy forgets the condition
        else:
            arrays[key] = np.where(rng.random(shapes[key[0]]) < 0.05, arrays[key], before[key])  # type: ignore[index]
    return arrays


def save_run(folder: Path, arrays: Arrays, step: int) -> Path:
    """A run's checkpoint, some of it in pieces."""
    shards = Shards(folder)
    states = {key: shards.whole(array) for key, array in arrays.items()}
    states["layers.0.w", "step"] = StateIndex.from_tensor(inline(np.array(step, dtype="f4")))
    groups = (ParamGroup(params=("layers.0.w", "layers.0.norm"), hyper={"lr": 0.1}),)
    write_checkpoint(replace(make_index(folder, states, groups=groups), step=step))
    return folder


def save_model(folder: Path, tensors: dict[str, NDArray[np.generic]]) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(params=["xor", "overwrite"])
def encoding(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    arrays: Arrays | None = None
    paths = []
    for number in range(4):
        arrays = make_run(number, arrays)
        paths.append(save_run(tmp_path / f"step{number}", arrays, number))
    return paths


class TestOfRuns:
    def test_all_states_are_what_they_were(self, runs: list[Path], tmp_path: Path, encoding: str) -> None:
        base = runs[0]
        for number, (_, run) in enumerate(pairwise(runs), 1):
            report = ucp.delta(base, run, tmp_path / f"chain/weight_v{number:06d}", encoding=encoding)
            assert (report.version, report.changed, report.tensors) == (str(number), 4, 7)
            base = Path(report.path)
        for number, run in enumerate(runs[1:], 1):
            delta = tmp_path / f"chain/weight_v{number:06d}"
            assert ucp.diff(delta, run).equal
            assert ucp.open(delta).step == number
            verified = ucp.verify(delta)
            assert verified.ok
            assert verified.checked_bytes > ucp.inspect(run).nbytes
        assert ucp.open(tmp_path / "chain", at=0).step == 0
        ucp.convert(tmp_path / "chain", tmp_path / "whole", verify=True)
        assert ucp.diff(tmp_path / "whole", runs[-1]).equal

    def test_labels_are_of_weights_and_of_states(self, runs: list[Path], tmp_path: Path) -> None:
        delta = Path(ucp.delta(runs[0], runs[1], tmp_path / "weight_v000007").path)
        index = json.loads((delta / INDEX).read_text())
        states = ("layers.0.w", "layers.0.w/exp_avg", "layers.0.w/exp_avg_sq", "layers.0.w/step")
        assert sorted(index["weight_map"]) == sorted(states)
        assert (index["metadata"]["version"], index["metadata"]["base_version"]) == ("000007", "000000")
        frame = load_file(delta / "model-00001-of-00001.safetensors")["layers.0.w"].tobytes()
        before, after = (ucp.open(run).read("layers.0.w").numpy().view(np.uint8) for run in runs[:2])
        assert zstandard.ZstdDecompressor().decompress(frame) == (before ^ after).tobytes()
        assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []

    def test_a_version_that_changes_nothing(self, runs: list[Path], tmp_path: Path, encoding: str) -> None:
        report = ucp.delta(runs[0], runs[0], tmp_path / "delta", encoding=encoding)
        assert (report.changed, report.nbytes_written) == (0, 0)
        assert ucp.verify(report.path).ok
        assert ucp.diff(report.path, runs[0]).equal


class TestWrongBases:
    @pytest.fixture
    def models(self, tmp_path: Path) -> list[Path]:
        rng = np.random.default_rng(0)
        tensors = [{name: rng.normal(size=(9, 7)).astype("f4") for name in ("a", "b")} for _ in range(3)]
        tensors[1]["b"] = tensors[0]["b"]
        return [save_model(tmp_path / f"model{number}", each) for number, each in enumerate(tensors)]

    def test_a_full_version_with_other_bytes_is_refused(self, models: list[Path], tmp_path: Path) -> None:
        delta = ucp.delta(models[0], models[1], tmp_path / "weight_v000001").path
        (models[0] / "model.safetensors").write_bytes((models[2] / "model.safetensors").read_bytes())
        with pytest.raises(CorruptError, match=r"model\.safetensors: [ab] .*weight_v000001"):
            ucp.convert(delta, tmp_path / "out")
        problems = ucp.verify(delta).problems
        assert any("b/weight: expected xxh3-128" in problem for problem in problems), "b has no patch"

    def test_a_store_of_another_version_is_refused(self, models: list[Path], tmp_path: Path) -> None:
        """Its checksums are right, and are not those of the base."""
        base = tmp_path / "weight_v000000"
        ucp.convert(models[0], base)
        delta = ucp.delta(base, models[1], tmp_path / "weight_v000001").path
        assert ucp.verify(delta).ok
        ucp.convert(models[2], base, overwrite=True)
        with pytest.raises(MalformedError, match=r"weight_v000000(?s:.*)weight_v000001"):
            ucp.open(delta)

    def test_a_delta_of_another_version_of_that_number_is_refused(self, models: list[Path], tmp_path: Path) -> None:
        for name in ("x", "y"):
            ucp.delta(models[0], models[1 if name == "x" else 2], tmp_path / name / "weight_v000001")
        ucp.delta(tmp_path / "x/weight_v000001", models[0], tmp_path / "x/weight_v000002")
        assert ucp.diff(tmp_path / "x", models[0]).equal
        (tmp_path / "x/weight_v000001").rename(tmp_path / "old")
        (tmp_path / "y/weight_v000001").rename(tmp_path / "x/weight_v000001")
        with pytest.raises(MalformedError, match=r"weight_v000001 .*weight_v000002"):
            ucp.open(tmp_path / "x")

    def test_an_edited_list_is_refused(self, models: list[Path], tmp_path: Path) -> None:
        delta = Path(ucp.delta(models[0], models[1], tmp_path / "weight_v000001").path)
        text = (delta / "ucp-delta.json").read_text()
        (delta / "ucp-delta.json").write_text(text.replace('"name":"b"', '"name":"c"'))
        with pytest.raises(MalformedError, match="digest"):
            ucp.open(delta)

    def test_every_byte_of_a_frame_that_is_flipped_stops_a_conversion(
        self, models: list[Path], tmp_path: Path, encoding: str
    ) -> None:
        delta = Path(ucp.delta(models[0], models[1], tmp_path / "weight_v000001", encoding=encoding).path)
        (file,) = delta.glob("*.safetensors")
        data = file.read_bytes()
        for position in range(8 + int.from_bytes(data[:8], "little"), len(data), 37):
            file.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
            with pytest.raises(CorruptError):
                ucp.convert(delta, tmp_path / "out")
        assert not (tmp_path / "out").exists()


class TestRefused:
    def test_other_tensors(self, runs: list[Path], tmp_path: Path) -> None:
        other = save_model(tmp_path / "model", {"layers.0.w": np.zeros((4, 3), "f4")})
        with pytest.raises(MisfitError, match=r"layers\.0\.w/weight: float32 \[40, 30\] and float32 \[4, 3\]"):
            ucp.delta(runs[0], other, tmp_path / "delta")

    def test_a_folder_that_is_there(self, runs: list[Path], tmp_path: Path) -> None:
        with pytest.raises(DestinationError, match="step2"):
            ucp.delta(runs[0], runs[1], runs[2])

    def test_a_version_that_is_not_later(self, runs: list[Path], tmp_path: Path) -> None:
        first = ucp.delta(runs[0], runs[1], tmp_path / "weight_v000005").path
        with pytest.raises(UsageError, match=r"after 5\b.*got 4"):
            ucp.delta(first, runs[2], tmp_path / "weight_v000004")
        with pytest.raises(UsageError, match=r"--encoding .*'sparse'"):
            ucp.delta(first, runs[2], tmp_path / "weight_v000006", encoding="sparse")

    def test_what_fails_leaves_nothing(self, runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[str] = []

        def fail(path: Path, data: bytes) -> None:
            seen.extend(entry.name for entry in tmp_path.iterdir() if entry.name.endswith("weight_v000001"))
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("ucp.chain.delta.write.replace_file", fail)
        with pytest.raises(OSError, match="No space"):
            ucp.delta(runs[0], runs[1], tmp_path / "weight_v000001")
        assert seen == []
        assert sorted(path.name for path in tmp_path.iterdir()) == [run.name for run in runs]


def test_the_command(runs: list[Path], tmp_path: Path) -> None:
    arguments = ["delta", str(runs[0]), str(runs[1]), "--out", str(tmp_path / "weight_v000001")]
    done = CliRunner().invoke(cli, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.output)
    assert (document["schema"], document["changed"], document["version"]) == ("ucp.delta/1", 4, "1")
    done = CliRunner().invoke(cli, [*arguments[:-1], str(tmp_path / "weight_v000002"), "--encoding", "overwrite"])
    assert "version 2, a delta of 4 tensors" in done.output


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), links=st.integers(1, 5))
def test_folded_links_are_the_version_that_they_lead_to(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, links: int
) -> None:
    root = tmp_path_factory.mktemp("links")
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    dtype = data.draw(st.sampled_from(["f4", "i8", "u1", "f2"]))
    arrays = {name: rng.integers(0, 100, (5, 6)).astype(dtype) for name in ("a", "b")}
    base = save_model(root / "weight_v000000", arrays)
    for number in range(1, links + 1):
        for name in data.draw(st.sets(st.sampled_from(["a", "b"]))):
            arrays[name] = np.where(rng.random((5, 6)) < 0.2, arrays[name] + 1, arrays[name]).astype(dtype)
        model = save_model(root / f"model{number}", arrays)
        encoding = data.draw(st.sampled_from(["xor", "overwrite"]))
        base = Path(ucp.delta(base, model, root / f"weight_v{number:06d}", encoding=encoding).path)
        assert ucp.diff(base, model).equal
