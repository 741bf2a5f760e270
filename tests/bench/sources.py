"""What is converted: checkpoints of 2.5 GB and more that real frameworks wrote, and one of very many small tensors.

The real ones have about 210M parameters and are made once, by the scripts that make the fixtures. The last one is
written here: it is about the size of an index, which no run on a small machine could reach.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.bench.scale.small_tensors import write_many_tensors

RANKS = 4
TENSORS = 150_000
"""Entries of the synthetic index, at least."""

_MAKE = Path(__file__).resolve().parents[2] / "fixtures" / "make"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint to convert."""

    title: str
    make: Callable[[Path], object]
    checkpoint: str
    by_deepspeed: bool = False
    only_index: bool = False
    targets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Other commands of ours: label to what follows `ucp convert SRC DST`."""
    rivals: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Commands of others: label to words, with {src} and {dst} in them."""

    def ready(self, folder: Path) -> Path:
        """The checkpoint, made if it is not in `folder` yet."""
        if not (folder / "done").exists():
            print(f"making {self.title} in {folder} (minutes)", file=sys.stderr, flush=True)
            folder.mkdir(parents=True, exist_ok=True)
            self.make(folder)
            (folder / "done").touch()
        return folder / self.checkpoint


def _deepspeed(case: str, folder: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    options = ["--case", case, "--model-scale", "big", "--no-truth", "--steps-after", "0", "--out", str(folder)]
    _run([*launcher, str(_MAKE / "deepspeed" / "deepspeed_train.py"), *options], {"DS_ACCELERATOR": "cpu"})
    for script_copy in (folder / "checkpoint").glob("*.py"):
        script_copy.unlink()


def _megatron(case: str, folder: Path) -> None:
    _run([str(_MAKE / "megatron" / "make_megatron.py"), "--out", str(folder), "--no-truth", "--steps", "1", case], {})


def _fsdp(folder: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    _run([*launcher, str(Path(__file__).with_name("fsdp_worker.py")), str(folder)], {})


def _small(folder: Path) -> None:
    _run(["-m", "tests.bench.torch_ways", "small", str(folder)], {})


def _by_torch(way: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.bench.torch_ways", way, "{src}", "{dst}")


def _by_accelerate() -> Mapping[str, tuple[str, ...]]:
    """`accelerate merge-weights`, of weights alone; nothing where accelerate is not installed."""
    python = os.environ.get("UCP_TRANSFORMERS", sys.executable)
    program = Path(python).parent / "accelerate"
    folder = "{src}/pytorch_model_fsdp_0"
    return {"accelerate merge-weights": (str(program), "merge-weights", folder, "{dst}")} if program.exists() else {}


def _run(command: Iterable[str], env: Mapping[str, str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    subprocess.run([sys.executable, *command], env=environment, check=True, stdout=subprocess.DEVNULL)


SOURCES: Mapping[str, Source] = {
    "z3": Source(
        title="DeepSpeed ZeRO-3, DP 4, fp32 states",
        make=partial(_deepspeed, "z3-dp4-fp32"),
        checkpoint="checkpoint",
        by_deepspeed=True,
    ),
    "z1": Source(
        title="DeepSpeed ZeRO-1, DP 4, bf16 model",
        make=partial(_deepspeed, "z1-dp4-bf16"),
        checkpoint="checkpoint",
        by_deepspeed=True,
    ),
    "mcore": Source(
        title="megatron-core 0.16.1, TP 2 PP 2, torch_dist dp_reshardable",
        make=partial(_megatron, "bench-tp2-pp2-dp"),
        checkpoint="bench-tp2-pp2-dp/checkpoint",
    ),
    "fsdp2": Source(
        title="FSDP2, DP 4, fp32, saved as accelerate does",
        make=_fsdp,
        checkpoint="checkpoint-1",
        targets={
            "ucp convert --to dcp": ("--to", "dcp", "--topology", "dp=8", "--set", "style=accelerate"),
            "ucp convert --to huggingface": (
                *("--to", "huggingface", "--set", "config=none"),
                *("--set", "num_attention_heads=8"),
            ),
        },
        rivals={
            "dcp_to_torch": _by_torch("merge"),
            "HuggingFaceStorageWriter": _by_torch("huggingface"),
            **_by_accelerate(),
        },
    ),
    "small": Source(
        title="20,000 tensors, most of 16 KiB, and an optimizer step each, torch.distributed.checkpoint",
        make=_small,
        checkpoint="checkpoint",
        targets={"ucp convert --to dcp": ("--to", "dcp")},
        rivals={"dcp.load and dcp.save": _by_torch("copy")},
    ),
    "many": Source(
        title=f"torch_dist metadata of over {TENSORS:,} tensors, synthetic",
        make=partial(write_many_tensors, tensors=TENSORS),
        checkpoint="checkpoint",
        only_index=True,
    ),
}
"""By the label used in the table."""
