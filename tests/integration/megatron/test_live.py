"""`ucp.load_into` into live runs of real megatron-core on a CPU: every rank holds the truth, bit for bit.

Weights of the model, masters, both moments, the step and the learning rates are those of the run that was saved; more
steps then make of them what that run itself made; and what Megatron saves of them is the checkpoint that was loaded.
The parts that the modules say they hold are compared with the rules of the model's family on the way.

Sources are kept fixtures, and two runs made here. All loads of a release share a process (`live_worker.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import ucp
from tests.integration.megatron.megatron_jobs import FIXTURES, environment
from tests.integration.megatron.test_megatron_load import padded

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

KEPT = FIXTURES / "megatron"
LLAMA = "llama of 8 layers, tp2 pp2 dp2"
MIXTRAL = "mixtral, tp2 ep2 dp2"
HALF = "llama in fp16, tp2"
FP16 = {"bf16": False, "fp16": True, "initial_loss_scale": 65536.0, "loss_scale_window": 4, "hysteresis": 2}
MADE: dict[str, tuple[str, str, dict[str, Any]]] = {
    LLAMA: ("llama", "tp2 pp2 dp2", {"num_layers": 8}),
    MIXTRAL: ("mixtral", "tp2 ep2 dp2", {}),
    HALF: ("llama", "tp2", FP16),
}
"""Source made here to its model, its layout and its settings; by megatron-core 0.16.1, with a distributed optimizer."""
TOKENS = 51
"""Rows of the vocabulary that are no padding."""
RATE = 0.0009913533761814538
"""Learning rate after the steps that all sources took."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """A source, and the run that it is loaded into."""

    src: str
    job: str
    release: str = "0.16.1"
    settings: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    fused_adam: bool = False
    saves: bool = False
    """Whether Megatron then writes what the ranks hold."""
    anew: str = ""
    """Weights alone: from a store of atoms ("ucp"), or a model of transformers ("huggingface")."""

    def __str__(self) -> str:
        told = {"fp16": True} if self.settings == FP16 else {**self.settings, **self.arguments}
        words = [f"{key}={value}" for key, value in told.items()]
        words += ["fused"] * self.fused_adam + [self.anew] * bool(self.anew)
        return f"{self.src}>{self.release}:{','.join([self.job, *words])}".replace(" ", "-")


PLAIN = {"use_distributed_optimizer": False}
FP32 = {"bf16": False}
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 3000}
LOADS = [
    # another layout of the run, which then goes on
    Load(src=LLAMA, job="tp1"),
    Load(src=LLAMA, job="tp4"),
    Load(src=LLAMA, job="pp4 vpp2", saves=True),
    Load(src=LLAMA, job="tp2 dp2", saves=True),
    Load(src=LLAMA, job="tp2 dp2", settings=PLAIN),
    Load(src=LLAMA, job="dp4", settings=OVERLAPPED),
    Load(src=MIXTRAL, job="ep4 dp4", saves=True),
    Load(src=MIXTRAL, job="tp1"),
    Load(src=MIXTRAL, job="pp2 ep2 dp2", settings=PLAIN),
    Load(src=HALF, job="dp2", settings=FP16),
    # weights in fp32, whose masters they are
    Load(src="llama-tp2-dp2-dp", job="tp2 dp2", settings=FP32),
    Load(src="llama-tp2-dp2-dp", job="tp2 dp2", settings=FP32 | PLAIN),
    # the kept fixtures, other models and releases
    Load(src="gpt-tp2-pp2-torch", job="pp2 dp2"),
    Load(src="gpt-dp4-dp", job="tp2 pp2", release="0.13.1"),
    Load(src="llama-tp2-dp2-modelspace-0.13.1", job="tp2 dp2", release="0.15.3"),
    Load(src="llama-pp2-vpp2-dp2-torch-zero", job="pp2 vpp2", release="0.19.2"),
    Load(src="qwen-tp4-torch-zero", job="tp2 dp2"),
    Load(src="qwen-tp4-torch-zero", job="tp4", release="0.19.2"),
    Load(src="mixtral-tp2-ep2-etp1-torch-zero", job="ep4 dp4", release="0.19.2"),
    Load(src="mixtral-ep4-dp4-full", job="ep2 dp2", release="0.15.3"),
    Load(src="mixtral-ep4-dp4-full", job="tp2 ep2 etp1"),
    Load(src="deepseek-tp2-ep2-dp2-torch-zero", job="tp2 ep2 etp1"),
    Load(src="deepseek-ep2-dp2-full-singleton", job="dp2", release="0.19.2"),
    Load(src="mamba-tp2-dp2-torch-zero", job="tp4"),
    Load(src="mamba-tp2-dp2-torch-zero-0.19.2", job="tp2 dp2", release="0.19.2"),
    # steps counted for groups, and for every parameter
    Load(src="qwen-tp2-dp2-dp-fused-buckets", job="tp2 dp2", fused_adam=True),
    Load(src="llama-tp2-torch-fused", job="dp2"),
    Load(src="llama-tp2-dp2-dp", job="tp2", settings=PLAIN, fused_adam=True),
    # another padding of the vocabulary
    Load(src="llama-tp2-dp2-dp", job="tp2 dp2", settings={"padded_vocab_size": 56}),
    Load(src="llama-tp2-dp2-dp", job="tp2 dp2", settings={"padded_vocab_size": 96}),
    Load(src="llama-tp2-dp2-dp", job="tp4", settings={"padded_vocab_size": 96} | FP32 | PLAIN, release="0.19.2"),
    # weights alone
    Load(src="llama-tp2-dp2-dp", job="tp2 dp2", arguments={"strict": False}, anew="ucp"),
    Load(src="llama-tp2-dp2-dp", job="tp2 pp2", arguments={"strict": False}, anew="huggingface"),
]
REFUSED = {
    "topology": (Load(src="llama-tp2-dp2-dp", job="tp2", arguments={"topology": "dp=2"}), "tp is 2, and 1 was given"),
    "no states": (Load(src="llama-tp2-dp2-dp", job="dp2", anew="ucp"), "the checkpoint holds no optimizer states"),
    "another model": (
        Load(src="llama-tp2-dp2-dp", job="pp2", settings={"num_layers": 6}),
        "tensors of the model are not in the checkpoint",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of the loads, and where Megatron wrote what it had been given."""

    root: Path
    results: Mapping[str, dict[str, Any]]

    def folder(self, src: str) -> Path:
        return self.root / slug(src) / "checkpoint" if src in MADE else KEPT / src / "checkpoint"


def slug(text: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in text)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Make the sources; run every load, a process for each release."""
    root = tmp_path_factory.mktemp("live")
    results: dict[str, dict[str, Any]] = {}
    found = Outcome(root=root, results=results)
    jobs: dict[str, dict[tuple[str, bool], list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for src, (model, layout, settings) in MADE.items():
        own = root / slug(src)
        own.mkdir()
        item = {"model": model, "settings": settings, "folder": str(own / "checkpoint")}
        item |= {"truth": str(own / "truth.safetensors"), "later": str(own / "later.safetensors")}
        jobs["0.16.1"][layout, False].append({"make": item})
    loads = {str(load): load for load in (*LOADS, *(load for load, _ in REFUSED.values()))}
    for name, load in loads.items():
        jobs[load.release][load.job, load.fused_adam].append({"load": described(load, found, root / slug(name))})
    said = [run(release, groups, root) for release, groups in sorted(jobs.items(), reverse=True)]
    for name in loads:
        result = root / f"{slug(name)}.json"
        own_result = (
            json.loads(result.read_text()) if result.exists() else {"error": "not reached:\n" + "\n".join(said)}
        )
        found.results[name] = own_result  # type: ignore[index]
    return found


def described(load: Load, found: Outcome, own: Path) -> dict[str, Any]:
    folder = found.folder(load.src)
    checkpoint = folder
    if load.anew:
        checkpoint = own.with_name(f"{own.name}-weights")
        ucp.convert(folder, checkpoint, to=load.anew, include=["*/weight"], workers=1)
    truth, later = KEPT / "truth" / f"{load.src.partition('-')[0]}.safetensors", Path()
    if load.src in MADE:
        truth, later = folder.with_name("truth.safetensors"), folder.with_name("later.safetensors")
    if rows := load.settings.get("padded_vocab_size"):
        truth = padded(truth, rows, own.with_name(f"{own.name}.safetensors"))
    if load.anew == "huggingface":
        truth = of_transformers(truth, own.with_name(f"{own.name}.safetensors"))
    return {
        "folder": str(folder),
        "checkpoint": str(checkpoint),
        "truth": str(truth),
        "later": str(later) if later.name else "",
        "result": str(own.with_name(f"{own.name}.json")),
        "settings": load.settings,
        "arguments": load.arguments,
        "saved": str(own) if load.saves else "",
        "anew": bool(load.anew),
    }


def of_transformers(truth: Path, path: Path) -> Path:
    """The truth, as far as a model of transformers holds it: weights as the model had them, without padding."""
    found = load_file(truth)
    for key, own in found.items():
        weight = found[key.replace("/weight", "/model")].to(own.dtype) if key.endswith("/weight") else own.clone()
        if key.startswith(("embedding.", "output_layer.")):
            weight[TOKENS:] = 0
        found[key] = weight
    save_file(found, path)
    return path


def run(release: str, groups: Mapping[tuple[str, bool], list[dict[str, Any]]], root: Path) -> str:
    """Run the jobs of one release, those that make sources first; what they said."""
    order = sorted(groups, key=lambda own: not any("make" in item for item in groups[own]))
    path = root / f"jobs-{release}.json"
    path.write_text(json.dumps([{"layout": k[0], "fused_adam": k[1], "items": groups[k]} for k in order]))
    command = [sys.executable, str(Path(__file__).with_name("live_worker.py")), str(path)]
    done = subprocess.run(command, env=environment(release), capture_output=True, text=True, check=False)
    return f"{done.stdout}\n{done.stderr}"[-6000:] if done.returncode else ""


@pytest.mark.parametrize("load", LOADS, ids=str)
def test_every_rank_holds_the_truth_and_goes_on(load: Load, outcome: Outcome) -> None:
    found = outcome.results[str(load)]
    assert not found.get("error"), found["error"]
    assert found["differences"] == []
    assert found["tensors"] >= 60
    if not load.anew:
        assert {group["lr"] for group in found["groups"]} == {RATE}
    assert {group["weight_decay"] for group in found["groups"]} == {0.0, 0.1}


def test_the_scale_of_the_loss_is_that_of_the_run(outcome: Outcome) -> None:
    (load,) = (load for load in LOADS if load.src == HALF)
    assert outcome.results[str(load)]["scale"] == 65536 * 4  # it grew twice


@pytest.mark.parametrize("load", [load for load in LOADS if load.saves], ids=str)
def test_what_megatron_then_saves_is_what_was_loaded(load: Load, outcome: Outcome) -> None:
    found = ucp.diff(outcome.folder(load.src), outcome.root / slug(str(load)))
    assert found.equal, str(found)


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_on_all_ranks(what: str, outcome: Outcome) -> None:
    load, says = REFUSED[what]
    assert says in outcome.results[str(load)]["error"]
