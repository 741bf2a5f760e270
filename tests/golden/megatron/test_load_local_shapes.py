"""Megatron checkpoints in plain modules of local shapes, against what Megatron's own ranks of that layout have saved.

All cases of a model hold the same state bit for bit (fixtures/PROVENANCE.md), so what each rank of one layout must hold
after loading the checkpoint of another is in the files of the first: names, shapes and elements.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ucp
from tests.golden.truth import load_stubbed
from tests.unit.live.cluster import module
from tests.unit.live.threads import ThreadRanks, run

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures" / "megatron"
CASES = [
    ("llama-tp2-dp2-dp", "llama-tp2-pp2-dp2-torch-zero"),
    ("llama-tp2-pp2-dp2-full", "llama-pp2-vpp2-dp2-torch-zero"),
    ("llama-pp2-vpp2-dp2-torch-zero", "llama-tp2-torch-fused"),
    ("gpt-dp4-dp", "gpt-tp2-pp2-torch"),
    ("qwen-tp2-dp2-dp-0.19.2", "qwen-tp4-torch-zero"),
    ("mixtral-ep4-dp4-full", "mixtral-tp2-ep2-etp1-torch-zero"),
    ("mixtral-pp2-ep2-dp2-dp", "mixtral-ep2-dp2-torch"),
    ("deepseek-ep2-dp2-full-singleton", "deepseek-tp2-ep2-dp2-torch-zero"),
    ("mamba-tp2-dp2-full", "mamba-tp2-dp2-torch-zero"),
]


def layout_of(case: str) -> dict[str, int]:
    layout = json.loads((FIXTURES / case / "case.json").read_text())["layout"]
    return {axis: int(degree) for axis, degree in layout.items()}


def saved_by(case: str, rank: int) -> list[dict[str, torch.Tensor]]:
    """The chunks that a rank of a case has, as its own file holds them."""
    own = layout_of(case)
    tp, pp, ep = rank % own["tp"], rank // (own["world"] // own["pp"]), rank // own["etp"] % own["ep"]
    numbers = [f"{tp:02d}", *([f"{pp:03d}"] if own["pp"] > 1 else []), *([f"{ep:03d}"] if own["ep"] > 1 else [])]
    folder = FIXTURES / case / "checkpoint" / "iter_0000010" / f"mp_rank_{'_'.join(numbers)}"
    state = load_stubbed(folder / "model_optim_rng.pt")
    chunks = [state[key] for key in sorted(state) if key.startswith("model")]
    return [{name: own for name, own in chunk.items() if isinstance(own, torch.Tensor)} for chunk in chunks]


@pytest.mark.parametrize(("source", "target"), CASES)
def test_every_rank_holds_what_megatrons_own_rank_holds(source: str, target: str) -> None:
    layout = layout_of(target)
    degrees = {axis: layout[axis] for axis in ("dp", "tp", "pp", "vpp", "ep", "etp")}

    def load(ranks: ThreadRanks) -> None:
        chunks = saved_by(target, ranks.rank)
        modules = [module({name: torch.full_like(own, torch.nan) for name, own in chunk.items()}) for chunk in chunks]
        model = modules if len(modules) > 1 else modules[0]
        ucp.load_into(model, degrees, FIXTURES / source / "checkpoint", process_group=ranks)
        for chunk, own in zip(chunks, modules, strict=True):
            for name, live in own.state_dict().items():
                assert torch.equal(live, chunk[name]), (ranks.rank, name)

    assert run(layout["world"], load) == [None] * layout["world"]


def llama_in_hugging_faces_names(layers: range) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the fixtures' Llama (8 heads of queries, 4 of keys and values, 4 long), of these layers."""
    shapes: dict[str, tuple[int, ...]] = {}
    if 0 in layers:
        shapes["model.embed_tokens.weight"] = (64, 20)
    for layer in layers:
        own = f"model.layers.{layer}."
        attention = {"q": (32, 20), "k": (16, 20), "v": (16, 20), "o": (20, 32)}
        shapes |= {f"{own}self_attn.{name}_proj.weight": shape for name, shape in attention.items()}
        shapes |= {f"{own}mlp.{name}_proj.weight": (28, 20) for name in ("gate", "up")}
        shapes[f"{own}mlp.down_proj.weight"] = (20, 28)
        shapes |= {f"{own}{name}_layernorm.weight": (20,) for name in ("input", "post_attention")}
    if 3 in layers:
        shapes |= {"model.norm.weight": (20,), "lm_head.weight": (64, 20)}
    return shapes


def test_stages_of_another_frameworks_model_hold_their_cuts() -> None:
    """Megatron's files into tensor-parallel stages of a Llama in Hugging Face's names, cut by hand."""
    checkpoint = FIXTURES / "llama-tp2-dp2-dp" / "checkpoint"
    every = llama_in_hugging_faces_names(range(4))
    whole = module(every)
    ucp.load_into(whole, checkpoint=checkpoint)

    def load(ranks: ThreadRanks) -> None:
        stage, tp = divmod(ranks.rank, 2)
        wanted = {}
        for name, shape in llama_in_hugging_faces_names(range(2 * stage, 2 * stage + 2)).items():
            dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
            tensor = whole.get_parameter(name).detach()
            is_cut = len(shape) == 2
            local = name.replace(f"layers.{2 * stage}.", "layers.0.").replace(f"layers.{2 * stage + 1}.", "layers.1.")
            wanted[local] = tensor.chunk(2, dim)[tp].contiguous() if is_cut else tensor
        own = module({name: tensor.shape for name, tensor in wanted.items()})
        ucp.load_into(own, "tp=2,pp=2", checkpoint, process_group=ranks)
        for name, live in own.state_dict().items():
            assert torch.equal(live, wanted[name]), (ranks.rank, name)

    assert run(4, load) == [None] * 4
