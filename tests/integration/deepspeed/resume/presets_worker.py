"""Train a small model of transformers under AutoEP, or go on from checkpoints of such a run: `presets_worker.py JOBS`.

A job without `checkpoint` trains three steps, saves, and trains two more. One with it loads, by `way`, and trains these
two. Each writes the losses of the last two steps, means over the batch of all ranks.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.comm.torch import TorchBackend
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import output_capturing

import ucp

COMMON = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 32}
LLAMA = {**COMMON, "num_hidden_layers": 2, "num_key_value_heads": 1}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8, "intermediate_size": 20}
SEEK = {
    **COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}
LINEAR = {
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {**LLAMA, "intermediate_size": 12, "num_local_experts": 4},
    "qwen2_moe": {**LLAMA, **MOE, "shared_expert_intermediate_size": 14},
    "qwen3_moe": {**LLAMA, **MOE, "mlp_only_layers": []},
    "qwen3_5_moe_text": {
        **LLAMA,
        **MOE,
        **LINEAR,
        "shared_expert_intermediate_size": 14,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "deepseek_v2": {**SEEK, "topk_method": "greedy"},
    "deepseek_v3": SEEK,
}
PRESETS = {"qwen2_moe": "qwen3_moe", "qwen3_5_moe_text": "qwen3_5_moe"}
"""Type of a model to the preset that AutoEP has for it, where they differ."""
ROWS, LENGTH = 8, 6


def main() -> None:
    """Carry out all jobs of the file."""
    _mend()
    deepspeed.init_distributed("gloo")
    for job in json.loads(Path(sys.argv[1]).read_text()):
        _carry_out(job)
        gc.collect()
        deepspeed.comm.barrier()
    sys.stdout.flush()
    os._exit(0)  # the threads of DeepSpeed's shared-memory communicator sometimes abort a normal exit


def _mend() -> None:
    """Let DeepSpeed 0.19.8 meet newer releases: transformers whose table of recorders takes no default, torch 2.13."""
    table = output_capturing._CanRecordRegistry
    get = table.get
    table.get = lambda self, key, *default: dict.get(self, key, *default) if default else get(self, key)
    TorchBackend.all_gather_into_tensor = torch.no_grad()(TorchBackend.all_gather_into_tensor)


def _carry_out(job: dict[str, Any]) -> None:
    torch.manual_seed(1 if job["checkpoint"] else 0)
    out, ranks = Path(job["out"]), deepspeed.comm.get_world_size()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(job["model"], **CONFIGS[job["model"]]))
    experts = {"enabled": True, "autoep_size": job["ep"], "use_grouped_mm": False}
    config = {
        "train_micro_batch_size_per_gpu": ROWS // ranks,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": job["stage"]},
        "expert_parallel": {**experts, "preset_model": PRESETS.get(job["model"], job["model"])},
        "checkpoint": {"load_universal": job["way"] == "universal"},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if job["way"] == "live":
        ucp.load_into(engine, checkpoint=job["checkpoint"])
    elif job["checkpoint"]:
        engine.load_checkpoint(job["checkpoint"])
    else:
        for _ in range(3):
            _step(engine)
        engine.save_checkpoint(out / "checkpoint")
        if deepspeed.comm.get_rank() == 0:
            model.config.save_pretrained(out)
    losses = [_step(engine) for _ in range(2)]
    if deepspeed.comm.get_rank() == 0:
        (out / "losses.json").write_text(json.dumps(losses))
    engine.destroy()


def _step(engine: Any) -> float:
    generator = torch.Generator().manual_seed(engine.global_steps)
    tokens = torch.randint(0, COMMON["vocab_size"], (ROWS, LENGTH), generator=generator)
    rows = tokens.chunk(deepspeed.comm.get_world_size())[deepspeed.comm.get_rank()]
    loss = engine(input_ids=rows, labels=rows, use_cache=False).loss
    engine.backward(loss)
    engine.step()
    total = loss.detach().clone()
    deepspeed.comm.all_reduce(total)
    return float(total) / deepspeed.comm.get_world_size()


if __name__ == "__main__":
    main()
