"""Folding deltas: the time of `ucp convert` of 64 deltas over that of reading base and patches.

    python -m tests.bench --case deltas

Every delta changes one in a hundred elements of every tensor. "Reading" decodes each frame once, as one thread of
zstandard does, and reads the base; it applies nothing and writes nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import xxhash
import zstandard
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.bench.measure import run

DELTAS = 64
SHAPE = (2048, 4096)
TENSORS = int(os.environ.get("UCP_BENCH_TENSORS", "155"))
"""Of 16.8 MB each; 155 are 2.6 GB."""
_CHANGED = 100
_BLOCK = 1 << 20


def main(repeats: int) -> None:
    """Print a table."""
    print(f"{TENSORS * 2 * SHAPE[0] * SHAPE[1] / 1e9:.2f} GB of bf16, {DELTAS} deltas, load {os.getloadavg()[0]:.1f}")
    for encoding in ("xor", "overwrite"):
        root = Path(".bench", f"deltas-{encoding}").absolute()
        if not (root / f"weight_v{DELTAS:06d}" / "done").exists():
            shutil.rmtree(root, ignore_errors=True)
            _write(root, encoding)
        ucp, out = str(Path(sys.executable).parent / "ucp"), root.with_name("deltas-out")
        command = [ucp, "convert", str(root), str(out), "--to", "huggingface", "--workers", "1", "--set", "config=none"]
        samples, reads = [], []
        for _ in range(repeats):
            shutil.rmtree(out, ignore_errors=True)
            began = time.perf_counter(), time.process_time()
            nbytes = _read(root)
            reads.append((time.perf_counter() - began[0], time.process_time() - began[1]))
            samples.append(run(command, env={"OMP_NUM_THREADS": "1"}))
        shutil.rmtree(out, ignore_errors=True)
        seconds, cpu = (median(of_run) for of_run in zip(*reads, strict=True))
        folded, busy = median(sample.seconds for sample in samples), median(sample.cpu_seconds for sample in samples)
        peak = max(sample.peak_bytes for sample in samples)
        print(f"{encoding:<9}  reading {nbytes / 1e9:6.2f} GB: {seconds:6.2f} s, {cpu:6.2f} CPU s")
        print(f"{'':<9}  folding: {folded:6.2f} s, {busy:6.2f} CPU s, {peak / 1e6:.0f} MB")
        print(f"{'':<9}  {folded / seconds:.2f}x, {busy / cpu:.2f}x of CPU")


def _write(root: Path, encoding: str) -> None:
    """A base, and deltas of it."""
    random = np.random.default_rng(0)
    names = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(TENSORS)]
    numel = SHAPE[0] * SHAPE[1]
    arrays = {name: random.integers(0, 1 << 16, numel, dtype=np.uint16) & 0xBFFF for name in names}
    base = root / "weight_v000000"
    base.mkdir(parents=True)
    _save_bf16(base / "model.safetensors", arrays)
    for version in range(1, DELTAS + 1):
        frames, sums = {}, {}
        for name, array in arrays.items():
            at = np.unique(random.integers(0, numel, numel // _CHANGED))
            change = random.integers(1, 8, at.size, dtype=np.uint16)
            array[at] ^= change
            if encoding == "xor":
                xor = np.zeros(numel, np.uint16)
                xor[at] = change
                text = xor.tobytes()
            else:
                low = array[at].astype(np.uint8)
                text = at.size.to_bytes(4, "little") + (2 * at).astype("<u4").tobytes() + low.tobytes()
            frames[name] = np.frombuffer(zstandard.ZstdCompressor(level=1).compress(text), np.uint8)
            sums[name] = xxhash.xxh3_128_hexdigest(array)
        folder = root / f"weight_v{version:06d}"
        folder.mkdir()
        save_file(frames, folder / "model.safetensors", sums)
        stated = {
            "version": f"{version:06d}",
            "base_version": f"{version - 1:06d}",
            "delta_encoding": encoding,
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
        }
        index = {"metadata": stated, "weight_map": dict.fromkeys(names, "model.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "done").touch()


def _save_bf16(path: Path, arrays: dict[str, np.ndarray]) -> None:
    import torch
    from safetensors.torch import save_file as save_tensors

    tensors = {name: torch.from_numpy(array).view(torch.bfloat16).reshape(SHAPE) for name, array in arrays.items()}
    save_tensors(tensors, path)


def _read(root: Path) -> int:
    """Read the base, and decode every frame. Returns the bytes of both."""
    total, block = 0, bytearray(_BLOCK)
    with (root / "weight_v000000" / "model.safetensors").open("rb", buffering=0) as file:
        while count := file.readinto(block):
            total += count
    for folder in sorted(root.glob("weight_v*"))[1:]:
        with safe_open(folder / "model.safetensors", "np") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                frame = file.get_tensor(name)
                with zstandard.ZstdDecompressor().stream_reader(frame) as stream:
                    while count := stream.readinto(block):
                        total += count
    return total
