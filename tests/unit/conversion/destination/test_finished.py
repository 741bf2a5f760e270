"""A destination that was finished and then lost something is never called complete, whatever wrote it."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

import ucp
from tests.unit.conversion.destination.test_bucket import DST, FIXTURES, SOURCES, TARGETS, converted, tree
from ucp.errors import DestinationError

SOURCE = {"huggingface": "huggingface", "megatron": "megatron"}
"""Kind of source that a target is written from here; DeepSpeed's if not named."""
POINTERS = {"latest", "latest_universal", "latest_checkpointed_iteration.txt"}
LAYOUTS = {**TARGETS, "megatron-torch": {**TARGETS["megatron"], "layout": "torch"}}


def source_of(target):
    return FIXTURES / SOURCES[SOURCE.get(target.partition("-")[0], "deepspeed")]


def resume(target, dst):
    return ucp.convert(source_of(target), dst, resume=True, workers=1, fsync=False, **LAYOUTS[target])


@pytest.mark.parametrize("target", LAYOUTS)
def test_every_file_is_looked_at(target, tmp_path):
    dst = tmp_path / "out"
    ucp.convert(source_of(target), dst, workers=1, fsync=False, **LAYOUTS[target])
    assert resume(target, dst).already_complete
    written = tree(dst)
    alike = Counter()
    for number, (name, data) in enumerate(written.items()):
        alike[Path(name).name] += 1
        if alike[Path(name).name] > 3:  # those of other parameters
            continue
        how = ("cut", "longer", "missing")[number % 3]
        damaged = {how: {"cut": data[:-1], "longer": data + b"\0", "missing": None}[how]}
        if name in POINTERS:  # a run that goes on from here writes it again
            damaged = {"missing": None}
        elif name == "ucp-conversion.json":
            damaged = {"cut": data[:-5], "empty": b"", "flipped": data.replace(b'"dropped"', b'"dropqed"')}
        for how, text in damaged.items():
            (dst / name).unlink() if text is None else (dst / name).write_bytes(text)
            with pytest.raises(DestinationError, match=name) as caught:
                resume(target, dst)
            assert ("remove" if name == "ucp-conversion.json" else "--overwrite") in str(caught.value), how
            (dst / name).write_bytes(data)
    assert resume(target, dst).already_complete


@pytest.mark.parametrize("target", ["ucp", "virtual", "dcp"])
def test_files_that_say_what_others_hold_are_compared_byte_for_byte(target, tmp_path):
    dst = tmp_path / "out"
    ucp.convert(source_of(target), dst, workers=1, fsync=False, **LAYOUTS[target])
    index = dst / (".metadata" if target == "dcp" else "ucp.json")
    data = bytearray(index.read_bytes())
    data[len(data) // 2] ^= 1
    index.write_bytes(data)
    with pytest.raises(DestinationError, match=rf"1 file in .*\n +{index.name}: CRC-32"):
        resume(target, dst)


@pytest.mark.parametrize("target", ["deepspeed", "megatron"])
def test_a_run_that_saved_there_since_is_not_in_the_way(target, tmp_path):
    dst = tmp_path / "out"
    ucp.convert(source_of(target), dst, workers=1, fsync=False, **LAYOUTS[target])
    (pointer,) = (dst / name for name in POINTERS if (dst / name).exists())
    pointer.write_text("global_step1000")
    assert resume(target, dst).already_complete


def test_what_is_damaged_is_written_anew_if_asked(tmp_path):
    dst = tmp_path / "out"
    ucp.convert(source_of("ucp"), dst, workers=1)
    written = tree(dst)
    for asked in ({"overwrite": True}, {"overwrite": True, "resume": True}):
        next(dst.glob("packs/*")).unlink()
        ucp.convert(source_of("ucp"), dst, workers=1, **asked)
        assert tree(dst) == written
    next(dst.glob("packs/*")).unlink()
    for asked in ({"part": "1/2"}, {"finalize": True}):
        with pytest.raises(DestinationError, match=r"packs/00000.safetensors: missing"):
            ucp.convert(source_of("ucp"), dst, workers=1, **asked)


@pytest.mark.parametrize("target", ["ucp", "dcp", "huggingface", "deepspeed"])
def test_a_bucket_is_looked_at_too(target, memory, tmp_path):
    src = source_of(target)
    converted(src, tmp_path, **TARGETS[target])
    assert converted(src, tmp_path, resume=True, **TARGETS[target]).already_complete
    written = {key.partition("/out/")[2]: (key, entry.getvalue()) for key, entry in memory.fs.store.items()}
    for name, (key, data) in written.items():
        damaged = [None] if name in POINTERS else [data[:-2], data + b"\0", None]
        for text in damaged[:1] if name == "ucp-conversion.json" else damaged:
            memory.fs.rm_file(key) if text is None else memory.fs.pipe_file(key, text)
            with pytest.raises(DestinationError, match=name):
                converted(src, tmp_path, resume=True, **TARGETS[target])
            memory.fs.pipe_file(key, data)
    assert ucp.verify(DST).ok


@pytest.mark.parametrize("target", [name for name in LAYOUTS if name != "virtual"])
def test_verify_measures_files_of_tensors(target, tmp_path):
    dst = tmp_path / "out"
    ucp.convert(source_of(target), dst, workers=1, fsync=False, **LAYOUTS[target])
    assert ucp.verify(dst).ok
    paths = {Path(ref.path) for _, _, state in ucp.inspect(dst).states() for ref in state.fragments if ref.path}
    paths = {path.name: path for path in sorted(paths)}  # those of a parameter, as those of the others
    for path in paths.values():
        data = path.read_bytes()
        path.write_bytes(data + b"\0\0\0\0")
        report = ucp.verify(dst)
        assert any(path.name in line for line in report.problems), path
        path.write_bytes(data)
    assert paths


def test_what_follows_a_file_that_grew_is_cut_off(tmp_path):
    """Whoever wrote behind the end of a file before it was put in place: safetensors would refuse it."""
    for number, asked in enumerate(({}, {"compress": True})):
        ucp.convert(source_of("ucp"), tmp_path / f"wanted-{number}", workers=1, **asked)
        dst = tmp_path / f"out-{number}"
        ucp.convert(source_of("ucp"), dst, part="1/1", workers=1, **asked)
        for path in Path(f"{dst}.ucp-partial", "data", "packs").iterdir():
            os.truncate(path, path.stat().st_size + 4)
        ucp.convert(source_of("ucp"), dst, finalize=True, workers=1, **asked)
        assert tree(dst) == tree(tmp_path / f"wanted-{number}")
