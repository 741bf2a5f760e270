"""Deltas in the layout of slime and SGLang, written here by hand: read, folded, checked."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard
from ml_dtypes import bfloat16
from numpy.typing import NDArray
from safetensors.numpy import save_file

import ucp
from ucp.errors import IdleOptionError, MalformedError, MissingFileError, SourceError, UnsupportedError, UsageError

Tensors = Mapping[str, NDArray[np.generic]]
INDEX = "model.safetensors.index.json"
CHECKSUMS: dict[str, Callable[[bytes], str]] = {
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
    "xxh3-128": xxhash.xxh3_128_hexdigest,
}


def save_full(folder: Path, tensors: Tensors) -> Path:
    folder.mkdir(parents=True)
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    return folder


def encode(before: bytes, after: bytes, encoding: str) -> bytes:
    a, b = np.frombuffer(before, np.uint8), np.frombuffer(after, np.uint8)
    if encoding == "xor":
        return (a ^ b).tobytes()
    at = np.flatnonzero(a != b).astype("<u4")
    return struct.pack("<I", at.size) + at.tobytes() + b[at].tobytes()


def save_delta(
    folder: Path, before: Tensors, after: Tensors, *, encoding: str = "xor", checksum: str = "adler32", **metadata: str
) -> Path:
    """What slime's trainer writes of the tensors that changed: a file for every two of them, the index last."""
    folder.mkdir(parents=True)
    version = int(folder.name.removeprefix("weight_v"))
    changed = [name for name in after if before[name].tobytes() != after[name].tobytes()]
    weight_map = {}
    for number in range(0, len(changed), 2):
        file = f"model-{number // 2 + 1:05d}-of-{(len(changed) + 1) // 2:05d}.safetensors"
        names = changed[number : number + 2]
        frames = {
            name: zstandard.ZstdCompressor(level=1).compress(
                encode(before[name].tobytes(), after[name].tobytes(), encoding)
            )
            for name in names
        }
        sums = {name: CHECKSUMS[checksum](after[name].tobytes()) for name in names}
        save_file({name: np.frombuffer(frame, np.uint8) for name, frame in frames.items()}, folder / file, sums)
        weight_map |= dict.fromkeys(names, file)
    stated = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum,
    }
    (folder / INDEX).write_text(json.dumps({"metadata": stated | metadata, "weight_map": weight_map}))
    return folder


def edit_index(folder: Path, **metadata: object) -> None:
    document = json.loads((folder / INDEX).read_text())
    changed = document["metadata"] | metadata
    document["metadata"] = {key: value for key, value in changed.items() if value is not None}
    (folder / INDEX).write_text(json.dumps(document))


def make_versions(count: int, seed: int = 0) -> list[dict[str, NDArray[np.generic]]]:
    """Versions of a model; a step changes about one element in a hundred, and not all tensors."""
    rng = np.random.default_rng(seed)
    shapes = {"embed.weight": (50, 16), "layers.0.w": (32, 48), "layers.0.norm": (32,), "count": ()}
    versions = [{name: rng.normal(size=shape).astype(bfloat16) for name, shape in shapes.items()}]
    versions[0]["layers.0.norm"] = versions[0]["layers.0.norm"].astype("f4")
    for step in range(1, count):
        version = {name: array.copy() for name, array in versions[-1].items()}
        for name in ("layers.0.w", "layers.0.norm" if step % 2 else "embed.weight"):
            flat = version[name].reshape(-1)
            at = rng.integers(0, flat.size, max(1, flat.size // 100))
            flat[at] = flat[at] * np.asarray(1.5, flat.dtype)
        versions.append(version)
    return versions


def read_all(path: Path, **options: object) -> dict[str, bytes]:
    checkpoint = ucp.open(path, **options)  # type: ignore[arg-type]
    states = {name: checkpoint.index.atoms[name].states["weight"].dtype for name in checkpoint.index.atoms}
    out = {}
    for name, dtype in states.items():
        tensor = checkpoint.read(name).contiguous()
        assert str(tensor.dtype) == f"torch.{dtype}"
        out[name] = tensor.flatten().view(__import__("torch").uint8).numpy().tobytes()
    return out


def to_bytes(tensors: Tensors) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in tensors.items()}


@pytest.fixture(params=["xor", "overwrite"])
def encoding(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def versions() -> list[dict[str, NDArray[np.generic]]]:
    return make_versions(5)


@pytest.fixture
def stack(tmp_path: Path, versions: list[dict[str, NDArray[np.generic]]], encoding: str) -> Path:
    root = tmp_path / "stack"
    save_full(root / "weight_v000000", versions[0])
    for number, (before, after) in enumerate(pairwise(versions), 1):
        save_delta(root / f"weight_v{number:06d}", before, after, encoding=encoding)
    return root


class TestReading:
    def test_every_version_is_what_it_was(self, stack: Path, versions: list[Tensors]) -> None:
        assert read_all(stack) == to_bytes(versions[-1])
        for number, version in enumerate(versions):
            assert read_all(stack, at=number) == to_bytes(version)
            assert read_all(stack / f"weight_v{number:06d}") == to_bytes(version)
            assert read_all(stack / "weight_v000004", at=number) == to_bytes(version)
        assert read_all(stack / "weight_v000002" / INDEX) == to_bytes(versions[2])

    def test_a_full_version_starts_the_chain_anew(self, stack: Path, versions: list[Tensors]) -> None:
        for file in (stack / "weight_v000002").iterdir():
            file.unlink()
        (stack / "weight_v000002").rmdir()
        save_full(stack / "weight_v000002", versions[2])
        for file in ("model.safetensors",):
            (stack / "weight_v000000" / file).unlink()
        assert read_all(stack) == to_bytes(versions[-1])

    def test_it_is_materialised_and_proved(self, stack: Path, versions: list[Tensors], tmp_path: Path) -> None:
        ucp.convert(stack, tmp_path / "atoms", at=3, verify=True)
        assert read_all(tmp_path / "atoms") == to_bytes(versions[3])
        assert ucp.diff(stack / "weight_v000003", tmp_path / "atoms").equal
        ucp.convert(stack, tmp_path / "half", dtypes={"weight": "float32"})
        found = ucp.open(tmp_path / "half").read("layers.0.w").numpy()
        assert found.tobytes() == versions[-1]["layers.0.w"].astype("f4").tobytes()

    def test_it_is_read_through_a_store_of_references(
        self, stack: Path, versions: list[Tensors], tmp_path: Path
    ) -> None:
        ucp.convert(stack, tmp_path / "virtual", virtual=True)
        assert read_all(tmp_path / "virtual") == to_bytes(versions[-1])

    def test_columns_of_ranks_are_read_in_tiles(self, tmp_path: Path, encoding: str) -> None:
        rng = np.random.default_rng(1)
        before = {"w": rng.integers(0, 99, (1024, 2048), dtype="i4")}
        after = {"w": before["w"].copy()}
        after["w"][::7, ::5] += 1
        save_full(tmp_path / "weight_v000000", before)
        save_delta(tmp_path / "weight_v000001", before, after, encoding=encoding)
        checkpoint = ucp.open(tmp_path)
        box = ucp.Box((3, 512), (1000, 100))
        assert checkpoint.index.atoms["w"].states["weight"].overlap == "patched"
        assert checkpoint.read("w", region=box).numpy().tobytes() == after["w"][3:1003, 512:612].tobytes()

    def test_an_index_without_a_change_is_a_version(self, stack: Path, versions: list[Tensors]) -> None:
        save_delta(stack / "weight_v000005", versions[-1], versions[-1])
        assert read_all(stack) == to_bytes(versions[-1])

    def test_a_tied_tensor_may_have_two_patches(self, tmp_path: Path, encoding: str) -> None:
        rng = np.random.default_rng(2)
        names = ("model.embed_tokens.weight", "lm_head.weight")
        one, other = rng.normal(size=(8, 4)).astype("f4"), rng.normal(size=(8, 4)).astype("f4")
        folder = save_full(tmp_path / "weight_v000000", dict.fromkeys(names, one))
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": True}))
        tied = save_delta(
            tmp_path / "weight_v000001",
            dict.fromkeys(names, one),
            dict.fromkeys(names, other),
            encoding=encoding,
        )
        assert read_all(tied) == {names[0]: other.tobytes()}
        wrong = save_delta(
            tmp_path / "weight_v000002",
            dict.fromkeys(names, other),
            {names[0]: one, names[1]: one + 1},
            encoding=encoding,
        )
        with pytest.raises(MalformedError, match="tied"):
            ucp.open(wrong)


class TestVerify:
    @pytest.mark.parametrize("checksum", CHECKSUMS)
    def test_a_good_stack_is_undamaged(self, tmp_path: Path, versions: list[Tensors], checksum: str) -> None:
        save_full(tmp_path / "weight_v000000", versions[0])
        save_delta(tmp_path / "weight_v000001", versions[0], versions[1], checksum=checksum)
        report = ucp.verify(tmp_path)
        assert report.ok
        changed = ("layers.0.w", "layers.0.norm")
        assert report.checked_bytes == sum(versions[1][name].nbytes for name in changed)
        assert any("2 tensors that it does not change" in note for note in report.notes)

    def test_every_byte_of_a_patch_that_is_flipped_is_seen(self, tmp_path: Path, encoding: str) -> None:
        rng = np.random.default_rng(3)
        before = {"w": rng.normal(size=(6, 5)).astype("f4")}
        after = {"w": before["w"] + np.float32(rng.random((6, 5)) < 0.2)}
        save_full(tmp_path / "weight_v000000", before)
        delta = save_delta(tmp_path / "weight_v000001", before, after, encoding=encoding)
        (file,) = delta.glob("*.safetensors")
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        missed = []
        for position in range(start, len(data)):
            file.write_bytes(data[:position] + bytes([data[position] ^ 0x55]) + data[position + 1 :])
            if ucp.verify(delta).ok:
                missed.append(position - start)
        assert missed == []
        file.write_bytes(data)
        assert ucp.verify(delta).ok

    def test_another_base_is_seen(self, tmp_path: Path, versions: list[Tensors]) -> None:
        save_full(tmp_path / "weight_v000000", make_versions(1, seed=9)[0])
        delta = save_delta(tmp_path / "weight_v000001", versions[0], versions[1])
        (problem, other) = ucp.verify(delta).problems
        assert "layers.0.norm/weight: expected adler32:" in problem
        assert "layers.0.w/weight" in other

    def test_a_checksum_without_its_library_is_noted(self, tmp_path: Path, versions: list[Tensors]) -> None:
        save_full(tmp_path / "weight_v000000", versions[0])
        delta = save_delta(tmp_path / "weight_v000001", versions[0], versions[1])
        edit_index(delta, checksum_format="blake3")
        report = ucp.verify(delta)
        if not report.problems:
            assert any("install the library blake3" in note for note in report.notes)


class TestRefused:
    def test_a_gap(self, stack: Path) -> None:
        (stack / "weight_v000002" / INDEX).rename(stack / "weight_v000002" / "no")
        for file in (stack / "weight_v000002").iterdir():
            file.unlink()
        (stack / "weight_v000002").rmdir()
        with pytest.raises(MissingFileError, match=r"expected version 2, which .*weight_v000003 is a patch of"):
            ucp.open(stack)

    def test_no_full_version(self, stack: Path) -> None:
        (stack / "weight_v000000").rename(stack.parent / "first")
        with pytest.raises(MissingFileError, match="weight_v000000"):
            ucp.open(stack)
        (stack / "weight_v000000").symlink_to(stack.parent / "first")
        assert len(ucp.open(stack).atoms) == 4

    @pytest.mark.parametrize("is_lost", [True, False])
    def test_patches_are_no_model(self, stack: Path, is_lost: bool) -> None:
        index = stack / "weight_v000003" / INDEX
        kept = {"weight_map": json.loads(index.read_text())["weight_map"]}
        index.unlink() if is_lost else index.write_text(json.dumps(kept))
        with pytest.raises(MalformedError, match="weight_v000003"):
            ucp.inspect(index.parent)

    def test_a_circle(self, stack: Path) -> None:
        edit_index(stack / "weight_v000001", base_version="000003")
        with pytest.raises(MalformedError, match="circle: 4 <- 3 <- 2 <- 1 <- 3"):
            ucp.open(stack)

    def test_a_folder_of_another_version(self, stack: Path) -> None:
        edit_index(stack / "weight_v000003", version="000007")
        with pytest.raises(MalformedError, match="expected version 3"):
            ucp.open(stack)

    def test_a_version_that_is_not_there(self, stack: Path) -> None:
        for path in (stack, stack / "weight_v000002"):
            with pytest.raises(UsageError, match="0, 1, 2"):
                ucp.open(path, at=9)
        with pytest.raises(IdleOptionError):
            ucp.open(stack / "weight_v000000", at=3)

    def test_a_base_of_another_model(self, tmp_path: Path, versions: list[Tensors]) -> None:
        save_full(tmp_path / "weight_v000000", {"other": versions[0]["layers.0.w"]})
        delta = save_delta(tmp_path / "weight_v000001", versions[0], versions[1])
        with pytest.raises(MalformedError, match=r"layers\.0\.w, of weight_v000001"):
            ucp.open(delta)

    def test_a_base_of_other_shapes(self, tmp_path: Path, versions: list[Tensors], encoding: str) -> None:
        wider = {name: np.zeros((*array.shape, 2), array.dtype) for name, array in versions[0].items()}
        save_full(tmp_path / "weight_v000000", wider)
        delta = save_delta(tmp_path / "weight_v000001", versions[0], versions[1], encoding=encoding)
        assert not ucp.verify(delta).ok

    @pytest.mark.parametrize(
        ("metadata", "error"),
        [
            ({"delta_encoding": "sparse"}, UnsupportedError),
            ({"delta_encoding": {"a": 1}}, UnsupportedError),
            ({"compression_format": "snappy"}, UnsupportedError),
            ({"checksum_format": "md5"}, UnsupportedError),
            ({"version": None}, MalformedError),
            ({"base_version": None}, MalformedError),
        ],
    )
    def test_an_index_of_another_kind(self, stack: Path, metadata: dict[str, Any], error: type[SourceError]) -> None:
        edit_index(stack / "weight_v000004", **metadata)
        with pytest.raises(error, match=next(iter(metadata))):
            ucp.open(stack)

    def test_files_that_the_index_does_not_fit(self, stack: Path) -> None:
        path = stack / "weight_v000004" / INDEX
        document = json.loads(path.read_text())
        document["weight_map"]["more"] = next(iter(document["weight_map"].values()))
        path.write_text(json.dumps(document))
        with pytest.raises(MalformedError, match="more: not in"):
            ucp.open(stack)
        document["weight_map"]["more"] = "model-00009-of-00009.safetensors"
        path.write_text(json.dumps(document))
        with pytest.raises(MissingFileError, match="00009"):
            ucp.open(stack)
