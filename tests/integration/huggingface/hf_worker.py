"""Models of transformers, trained, saved and loaded.

    torchrun --nproc-per-node 2 hf_worker.py train fsdp2|deepspeed MODEL OUT
    python hf_worker.py load FOLDER ...

`train` steps three times, saves OUT/checkpoint by torch.distributed.checkpoint or DeepSpeed (ZeRO 2, bfloat16), the
configuration as OUT/model/config.json, and what the trained model computes as OUT/logits.pt. `load` prints a line of
JSON for each folder: missing, unexpected and mismatched keys, the type, and where its logits are: FOLDER.logits.pt.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    "llama-tied": lambda: transformers.LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, **HEADS),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, n_inner=48),
    "gemma": lambda: transformers.GemmaConfig(**SIZES, **HEADS, head_dim=8),
}
"""The last is of a family that ucp does not know: its names are Hugging Face's already."""
STEPS = 3


def main() -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    if sys.argv[1] == "load":
        for folder in sys.argv[2:]:
            print(json.dumps(loaded(Path(folder))), flush=True)
        return
    kind, name, out = sys.argv[2:]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name]())
    trained = {"fsdp2": with_fsdp2, "deepspeed": with_deepspeed}[kind](model, Path(out) / "checkpoint")
    if dist.get_rank() == 0:
        trained.config.save_pretrained(Path(out) / "model")
        torch.save(logits(trained), Path(out) / "logits.pt")
    dist.barrier()
    dist.destroy_process_group()


def tokens(seed: int, vocabulary: int = 64) -> Tensor:
    return torch.randint(0, vocabulary, (2, 12), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model.eval()(input_ids=tokens(99, min(50, model.config.vocab_size))).logits


def with_fsdp2(model: nn.Module, folder: Path) -> nn.Module:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.fsdp import fully_shard

    config = model.config
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),)) if hasattr(dist, "init_device_mesh") else None
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        batch = tokens(2 * step + dist.get_rank())
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    whole, _ = get_state_dict(model, [], options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    twin = AutoModelForCausalLM.from_config(config)
    if dist.get_rank() == 0:
        twin.load_state_dict(whole)
    return twin


def with_deepspeed(model: nn.Module, folder: Path) -> nn.Module:
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}},
        },
    )
    for step in range(STEPS):
        batch = tokens(2 * step + dist.get_rank())
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
    engine.save_checkpoint(str(folder))
    return engine.module


def loaded(folder: Path) -> dict[str, object]:
    model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    torch.save(logits(model), folder.with_suffix(".logits.pt"))
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    return {
        **{kind: [str(own) for own in told[kind]] for kind in kinds},
        "dtype": str(model.dtype),
        "class": type(model).__name__,
        "files": sorted(own.name for own in folder.iterdir()),
    }


if __name__ == "__main__":
    main()
