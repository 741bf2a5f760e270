"""A Megatron run goes on in transformers' Llama under FSDP2, tensor parallelism and DDP, and from there in Megatron.

Its checkpoint (tp 2, pp 2, dp 2, distributed optimizer) was written by megatron-core. `ucp.load_into` brings it into a
model under Hugging Face's names, and converted, plain torch.distributed.checkpoint loads it (`llama_worker.py`): what
all ranks then hold is compared bit for bit with what Megatron's ranks held, and logits and losses with those of
megatron-core's own GPTModel. What FSDP2 saves goes back, and megatron-core at tp 2, pp 2 must hold what it once had.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "megatron"))

import pytest
import torch
from megatron_jobs import FIXTURES, Load, Loaded, environment, load_all
from safetensors.torch import load_file, save_file

import ucp
from ucp.source.read import index_of

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

SOURCE = FIXTURES / "megatron" / "llama-tp2-pp2-dp2-full" / "checkpoint"
TRUTH = FIXTURES / "megatron" / "truth" / "llama.safetensors"
WAYS = ("fsdp2", "fsdp2-tp", "ddp", "live/fsdp2", "live/fsdp2-tp", "live/ddp")
LAYERS, HEADS, GROUPS, WIDTH, STEP = 4, 8, 4, 4, 10
HYPER = ("lr", "betas", "eps", "weight_decay")
SIZES = {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "kv_channels": WIDTH}
OURS = {"transformer_impl": "local", "override_opt_param_scheduler": "true"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the runs left."""

    root: Path

    def held(self, way: str) -> dict[str, torch.Tensor]:
        """What all ranks held, whole."""
        return load_file(self.root / f"{way}.safetensors")

    def report(self, way: str) -> dict[str, list[float]]:
        """Logits and losses."""
        return json.loads((self.root / f"{way}.json").read_text())


def interpreter() -> str:
    """Python with transformers in it; `make integration` makes one."""
    other = os.environ.get("UCP_TRANSFORMERS")
    if other is None and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers, here or where UCP_TRANSFORMERS says; `make integration` installs it")
    return other or sys.executable


def run(command: list[str], environment: Mapping[str, str]) -> None:
    quiet = {**environment, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    python, root = interpreter(), tmp_path_factory.mktemp("llama")
    ucp.convert(SOURCE, root / "dcp", to="dcp", names="huggingface", topology="dp=4")
    groups = [{key: own.hyper[key] for key in HYPER} for own in index_of(SOURCE).groups]
    job = {"checkpoint": str(root / "dcp"), "groups": groups, "truth": str(TRUTH), "step": STEP, "live": ""}
    jobs, live = root / "jobs.json", root / "live"
    live.mkdir()
    worker = str(Path(__file__).with_name("llama_worker.py"))
    ranks = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    jobs.write_text(json.dumps(job | {"out": str(live), "live": str(SOURCE)}))
    run([*ranks, worker, str(jobs)], os.environ)
    jobs.write_text(json.dumps(job | {"out": str(root), "save": str(root / "saved")}))
    run([*ranks, worker, str(jobs)], os.environ)
    run([python, worker, str(jobs), "--reference"], environment("0.16.1"))
    return Outcome(root)


def under_names_of_hugging_face(truth: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Megatron's tensors as transformers has them, by hand: masters, moments and the step."""
    whole = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": "lm_head.weight",
    }
    for layer in range(LAYERS):
        ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
        whole |= {
            f"{ours}.input_layernorm.weight": f"{theirs}.input_layernorm.weight",
            f"{ours}.self_attention.linear_proj.weight": f"{theirs}.self_attn.o_proj.weight",
            f"{ours}.pre_mlp_layernorm.weight": f"{theirs}.post_attention_layernorm.weight",
            f"{ours}.mlp.linear_fc2.weight": f"{theirs}.mlp.down_proj.weight",
        }
    found: dict[str, torch.Tensor] = {}
    for state in ("weight", "exp_avg", "exp_avg_sq"):
        found |= {f"{theirs}/{state}": truth[f"{ours}/{state}"] for ours, theirs in whole.items()}
        for layer in range(LAYERS):
            theirs = f"model.layers.{layer}"
            qkv = truth[f"decoder.layers.{layer}.self_attention.linear_qkv.weight/{state}"]
            turns = qkv.reshape(GROUPS, HEADS // GROUPS + 2, WIDTH, -1)
            apart = {"q": turns[:, :-2], "k": turns[:, -2], "v": turns[:, -1]}
            for kind, own in apart.items():
                found[f"{theirs}.self_attn.{kind}_proj.weight/{state}"] = own.reshape(-1, qkv.shape[1])
            gate, up = truth[f"decoder.layers.{layer}.mlp.linear_fc1.weight/{state}"].chunk(2)
            found |= {f"{theirs}.mlp.gate_proj.weight/{state}": gate, f"{theirs}.mlp.up_proj.weight/{state}": up}
    steps = {f"{name.rpartition('/')[0]}/step": torch.tensor(float(STEP)) for name in found}
    return found | steps


@pytest.mark.parametrize("way", WAYS)
def test_every_state_is_what_megatrons_ranks_held(way: str, outcome: Outcome) -> None:
    found, wanted = outcome.held(way), under_names_of_hugging_face(load_file(TRUTH))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("way", WAYS)
def test_logits_and_losses_are_those_of_megatron_core(way: str, outcome: Outcome) -> None:
    """fp32 on two code paths: equal to rounding."""
    own, wanted = outcome.report(way), outcome.report("reference")
    assert own["logits"] == pytest.approx(wanted["logits"], rel=1e-4, abs=1e-5 * max(map(abs, wanted["logits"])))
    assert own["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert len(set(own["losses"])) == len(own["losses"])


def under_names_of_megatron(held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The way back by hand: what `under_names_of_hugging_face` takes apart is joined; the model's weights round."""
    numbered, start = {}, 0
    for name, tensor in load_file(TRUTH).items():
        if not name.endswith("/model"):
            numbered[name] = torch.arange(start, start + tensor.numel()).reshape(tensor.shape)
            start += tensor.numel()
    apart = {name: own for name, own in under_names_of_hugging_face(numbered).items() if not name.endswith("/step")}
    values = torch.empty(start)
    for name, places in apart.items():
        values[places.flatten()] = held[name].flatten()
    found = {name: values[places] for name, places in numbered.items()}
    rounded = {name: own.bfloat16() for name, own in found.items() if name.endswith("/weight")}
    return found | {f"{name.removesuffix('weight')}model": own for name, own in rounded.items()}


@pytest.fixture(scope="module")
def back(outcome: Outcome) -> Mapping[str, Loaded]:
    """What megatron-core loads of what FSDP2 saved at once, and FSDP2 with tensor parallelism after three steps."""
    trained = outcome.root / "trained-truth.safetensors"
    save_file(under_names_of_megatron(outcome.held("trained")), trained)
    loads = []
    for name, truth in (("saved", TRUTH), ("trained", trained)):
        folder = outcome.root / f"{name}-back"
        settings = {**SIZES, **OURS}
        ucp.convert(
            outcome.root / name,
            folder,
            to="megatron",
            topology="tp=2,pp=2",
            dtypes={"weight": "bfloat16"},
            settings=settings,
        )
        loads.append(Load(name=name, folder=folder, layout="tp2 pp2", release="0.16.1", truth=truth))
    return load_all(loads, outcome.root / "scratch")


def test_megatron_core_holds_again_what_it_had(back: Mapping[str, Loaded]) -> None:
    found = back["saved"]
    assert not found.error
    assert (found.tensors, found.differences) == (108, ())


def test_megatron_core_holds_what_was_trained_in_between(back: Mapping[str, Loaded]) -> None:
    """The worker expects the step of the fixtures, so that the later one is all that differs."""
    found = back["trained"]
    assert not found.error
    assert (found.tensors, found.differences) == (108, (f"step: expected {STEP}; got [{STEP + 3}.0]",))
