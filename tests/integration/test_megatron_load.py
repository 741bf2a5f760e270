"""Files that `ucp` wrote, loaded by real megatron-core on a CPU: every rank holds the truth, bit for bit.

Weights of the model, masters, both moments and the step are gathered from all ranks and compared with what the run that
made the source held (fixtures/megatron_load.py). Sources are kept fixtures; releases of megatron-core are fetched.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ucp.api import convert

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

FIXTURES = Path(__file__).parents[2] / "fixtures"
CACHE = os.environ.get("UCP_MCORE")


@dataclass(frozen=True, kw_only=True)
class Load:
    """A source, what is made of it, and the job that loads that."""

    src: str
    to: str
    job: str
    version: str = "0.16.1"
    layout: str = "torch_dist"
    settings: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()

    @property
    def model(self) -> str:
        return self.src.partition("-")[0]

    def __str__(self) -> str:
        return f"{self.src}>{self.layout}:{self.to}>{self.version}:{self.job.replace(' ', '-')}"


LOADS = [
    # torch_dist: one file, any layout
    Load(src="llama-tp2-dp2-dp", to="tp=2,pp=2", job="tp2 pp2"),
    Load(src="llama-tp2-dp2-dp", to="tp=2,pp=2", job="tp1"),
    Load(src="llama-tp2-dp2-dp", to="tp=2,pp=2", job="pp2 vpp2"),
    Load(src="llama-tp2-dp2-dp", to="tp=2,pp=2", job="dp2", version="0.19.2"),
    Load(src="llama-tp2-dp2-dp", to="tp=2,pp=2", job="tp2", version="0.15.3"),
    Load(src="llama-tp2-dp2-modelspace-0.13.1", to="tp=1", job="tp2"),
    Load(src="gpt-tp2-pp2-torch", to="tp=2", job="tp2 pp2", settings={"use_distributed_optimizer": "true"}),
    Load(src="gpt-dp4-dp", to="tp=2", job="tp2", settings={"use_distributed_optimizer": "false"}),
    Load(src="gpt-dp4-dp", to="pp=2,dp=2", job="pp2 dp2", version="0.19.2"),
    Load(src="qwen-tp4-torch-zero", to="tp=2,pp=2", job="tp2 pp2"),
    Load(src="mixtral-ep4-dp4-full", to="tp=2,ep=2,etp=1", job="tp2 ep2 etp1"),
    Load(src="mixtral-tp2-ep2-etp1-torch-zero", to="ep=4,dp=4", job="ep4 dp4"),
    Load(src="mixtral-tp2-ep2-etp1-torch-zero", to="tp=2,pp=2", job="dp2", version="0.19.2"),
    Load(src="deepseek-tp2-ep2-dp2-torch-zero", to="tp=2,pp=2", job="tp2 pp2"),
    Load(src="deepseek-ep2-dp2-full-singleton", to="tp=2", job="tp1", version="0.19.2"),
    Load(src="mamba-tp2-dp2-torch-zero", to="tp=4", job="tp4"),
    # legacy files: their own layout
    Load(src="llama-tp2-dp2-dp", to="tp=2,pp=2", job="tp2 pp2", layout="torch"),
    Load(src="llama-tp2-pp2-dp2-full", to="pp=2,vpp=2", job="pp2 vpp2", layout="torch"),
    Load(src="llama-tp2-dp2-dp", to="tp=2,dp=2", job="tp2 dp2", layout="torch", version="0.19.2"),
    Load(src="llama-tp2-torch-fused", to="tp=4", job="tp4", layout="torch", flags=("--fused-adam",)),
    Load(
        src="gpt-dp4-dp",
        to="pp=2,dp=2",
        job="pp2 dp2",
        layout="torch",
        settings={"overlap_grad_reduce": "true", "ddp_bucket_size": "3000"},
    ),
    Load(src="gpt-tp2-pp2-torch", to="tp=2", job="tp2", layout="torch"),
    Load(src="mixtral-ep4-dp4-full", to="tp=2,ep=2,etp=1", job="tp2 ep2 etp1", layout="torch"),
    Load(src="mixtral-pp2-ep2-dp2-dp", to="tp=2,pp=2", job="tp2 pp2", layout="torch"),
    Load(src="deepseek-ep2-dp2-full-singleton", to="tp=2,ep=2,etp=1", job="tp2 ep2 etp1", layout="torch"),
    Load(src="mamba-tp2-dp2-torch-zero", to="tp=4", job="tp4", layout="torch"),
    Load(src="qwen-tp2-dp2-dp-fused-buckets", to="tp=4", job="tp4", layout="torch", flags=("--fused-adam",)),
]

FOREIGN = [
    ("dp=2,zero=2", "tp=2", "tp2", "torch_dist"),
    ("dp=4,zero=3", "tp=2,pp=2", "tp2 pp2", "torch"),
    ("", "pp=2,vpp=2", "pp2 vpp2", "torch_dist"),
]
"""DeepSpeed's layout on the way (universal where there is none), and what is made of that."""


def loaded(folder: Path, load: Load) -> None:
    """Load `folder` in the job of `load`; its ranks must hold the truth."""
    truth = FIXTURES / "megatron" / "truth" / f"{load.model}.safetensors"
    command = [sys.executable, str(FIXTURES / "megatron_load.py"), str(folder), "--truth", str(truth)]
    command += ["--version", load.version, "--layout", load.job, *(["--cache", CACHE] if CACHE else []), *load.flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert "tensors as they should be" in done.stdout
    print(done.stdout.strip())


@pytest.mark.parametrize("load", LOADS, ids=str)
def test_megatron_holds_the_truth(load, tmp_path):
    src = FIXTURES / "megatron" / load.src / "checkpoint"
    convert(
        src, tmp_path / "out", to="megatron", topology=load.to, layout=load.layout, settings=load.settings, workers=1
    )
    loaded(tmp_path / "out", load)


@pytest.mark.parametrize(("zero", "to", "job", "layout"), FOREIGN, ids=lambda own: own or "universal")
def test_a_run_of_deepspeed_goes_on_in_megatron(zero, to, job, layout, tmp_path):
    """Megatron to DeepSpeed and back: names and regions are all that is left of Megatron in between."""
    load = Load(src="llama-tp2-dp2-dp", to=to, job=job, layout=layout)
    src = FIXTURES / "megatron" / load.src / "checkpoint"
    target = "deepspeed" if zero else "deepspeed-universal"
    convert(src, tmp_path / "zero", to=target, topology=zero or None, workers=1)
    settings = {"num_attention_heads": "8", "transformer_impl": "local", "override_opt_param_scheduler": "true"}
    convert(
        tmp_path / "zero",
        tmp_path / "out",
        to="megatron",
        topology=to,
        layout=layout,
        settings=settings,
        dtypes={"weight": "bfloat16"},
        workers=1,
    )
    loaded(tmp_path / "out", load)
