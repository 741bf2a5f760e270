"""Runs of megatron-core, and what transformers computes from what `--to huggingface` made of their checkpoints.

    python megatron_worker.py make OUT MODEL ...
    python megatron_worker.py load OUT MODEL ...

Needs transformers, and megatron-core on PYTHONPATH. `make` trains a step on one rank, saves OUT/MODEL/checkpoint, and
what megatron-core's own model computes with the weights of bfloat16, in float32, as OUT/MODEL/logits.pt. `load` has
OUT/MODEL/hf alone, and prints a line of JSON: keys that are missing or left over, the largest logit and difference.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "fixtures" / "make" / "megatron"))

import megatron_model
import torch
import transformers.models.auto.modeling_auto  # before the stand-ins for CUDA
from megatron_args import arguments
from megatron_cases import TRUE_VOCABULARY, Case, Layout
from megatron_checkpoint import save
from megatron_ranks import run_ranks
from megatron_shims import install, kernels, patch_mcore
from megatron_state import train
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

SIZES = {"hidden_size": 32, "kv_channels": 4, "rotary_base": 25000, "max_position_embeddings": 16}
MODELS = {
    "llama": ("llama", {"norm_epsilon": 0.05}),
    "llama-3.1": ("llama", {"use_rope_scaling": True, "rope_scaling_factor": 4.0, "kv_channels": 8}),
    "qwen2": ("qwen", {"qk_layernorm": False}),
    "qwen3": ("qwen", {"add_qkv_bias": False}),
    "mixtral": ("mixtral", {}),
    "qwen3-moe": ("mixtral", {"qk_layernorm": True, "moe_router_pre_softmax": True}),
    "gpt": ("gpt", {"kv_channels": 8, "norm_epsilon": 0.05}),
    "deepseek-v3": ("deepseek", {"kv_channels": 8, "moe_router_topk_scaling_factor": 1.5}),
    "deepseek-v2": (
        "deepseek",
        {
            "kv_channels": 8,
            "moe_router_enable_expert_bias": False,
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": True,
        },
    ),
}
"""Name to a model of the kept checkpoints, and arguments that differ: none is what transformers takes by default."""


def main() -> None:
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    what, out, *names = sys.argv[1:]
    if what == "load":
        torch.set_num_threads(1)
        for name in names:
            print(json.dumps({"model": name, **loaded(Path(out) / name)}), flush=True)
        return
    install()
    with kernels():
        megatron_model.load_mcore()
    for name in names:
        run_ranks(1, make, name, Path(out) / name)


def make(name: str, folder: Path) -> None:
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # 0.16 asks for it by name where there is no Transformer Engine
    patch_mcore(fused_adam=False)
    model, changed = MODELS[name]
    case = Case(model=model, layout=Layout.parse("tp1"), format="torch", distributed=False, proves="logits")
    args = arguments(case)
    for key, value in {**SIZES, **changed}.items():
        setattr(args, key, value)
    megatron_model.initialize_parallel(args)
    job = megatron_model.build(args, randomize)
    train(job, 1)
    save(job, folder / "checkpoint", {})
    plain = argparse.Namespace(**{**vars(args), "bf16": False, "params_dtype": torch.float32})
    twin = megatron_model._model(plain, megatron_model._config(plain), 0)
    twin.load_state_dict(job.modules[0].state_dict())
    torch.save(by_megatron(twin.float().eval()), folder / "logits.pt")


@torch.no_grad()
def randomize(modules: list[nn.Module]) -> None:
    """Weights large enough that every one shows in the logits; norms around one, so that none is the identity."""
    generator = torch.Generator().manual_seed(0)
    for module in modules:
        tensors = [*module.named_parameters(), *(own for own in module.named_buffers() if "expert_bias" in own[0])]
        for name, tensor in tensors:
            norm = tensor.ndim == 1 and "layernorm" in name and name.endswith("weight")
            tensor.copy_(norm + 0.25 * torch.randn(tensor.shape, generator=generator))


def tokens() -> Tensor:
    return torch.randint(0, TRUE_VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def by_megatron(module: nn.Module) -> Tensor:
    batch = tokens()
    length = batch.shape[1]
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    return module(batch, torch.arange(length).expand_as(batch), mask)


@torch.no_grad()
def loaded(folder: Path) -> dict[str, object]:
    model, told = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32, output_loading_info=True)
    found = model.eval()(input_ids=tokens()).logits
    wanted = torch.load(folder / "logits.pt")[..., : found.shape[-1]]
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    return {
        "class": type(model).__name__,
        "vocabulary": found.shape[-1],
        "keys": sorted(str(own) for kind in kinds for own in told[kind]),
        "largest": wanted.abs().max().item(),
        "difference": (found - wanted).abs().max().item(),
    }


if __name__ == "__main__":
    main()
