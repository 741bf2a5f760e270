"""A model of transformers that is larger than the memory that it may use.

    python stream_worker.py make llama|mixtral|qwen2|qwen3 FOLDER   saves a model with random weights, and its logits
    python stream_worker.py ucp|load FOLDER                     computes the logits with a third of its size as memory
    torchrun ... stream_worker.py ranks FOLDER                  the same on several ranks, which exchange what they read

`ucp` prints a line of JSON: seconds of each pass, bytes read and kept, hits and misses of the cache; `ranks` bytes read
by each rank. Both compare logits, and tokens that `generate` appends, with those of the whole model.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor, distributed, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

import ucp
import ucp.streaming.stream

SIZES = {"vocab_size": 512, "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8,
         "num_key_value_heads": 4}  # fmt: skip
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, intermediate_size=1024),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, intermediate_size=1024, num_local_experts=8),
    "qwen2": lambda: transformers.Qwen2MoeConfig(
        **SIZES, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=512, shared_expert_intermediate_size=512
    ),
    "qwen3": lambda: transformers.Qwen3MoeConfig(
        **SIZES, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=512, head_dim=64
    ),
}
PASSES = 3


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    if sys.argv[1] == "make":
        make(sys.argv[2], Path(sys.argv[3]))
        return
    folder = Path(sys.argv[2])
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    config = AutoConfig.from_pretrained(folder)
    expected, text = torch.load(folder / "logits.pt"), torch.load(folder / "text.pt")
    functional.linear(torch.ones(64, 64), torch.ones(64, 64))  # with the memory of the library
    np.ones(1)
    if sys.argv[1] == "ranks":
        exchange(config, folder, expected, text)
        return
    limit(size // 3)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if sys.argv[1] == "load":
        ucp.load_into(model, folder)
        print("loaded")
        return
    stream = ucp.stream(model, folder, slots=2, cache_nbytes=size // 8, threads=1)
    seconds = []
    for _ in range(PASSES):
        begun = time.perf_counter()
        assert torch.equal(logits(model), expected)
        seconds.append(time.perf_counter() - begun)
    assert torch.equal(generate(model), text)
    told = {"passes": seconds, "hits": stream.cache_hits, "misses": stream.cache_misses, "read": stream.nbytes_read}
    print(json.dumps({**told, "size": size, "resident": stream.resident_nbytes}))


def limit(nbytes: int) -> None:
    """Let this process have `nbytes` more of private memory than it has now."""
    status = Path("/proc/self/status").read_text()
    (now,) = (int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (now + nbytes, now + nbytes))


def make(name: str, folder: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name]()).eval()
    if name != "llama":
        model.set_experts_implementation("eager")
    model.save_pretrained(folder)
    torch.save(logits(model), folder / "logits.pt")
    torch.save(generate(model), folder / "text.pt")


def exchange(config: transformers.PretrainedConfig, folder: Path, expected: Tensor, text: Tensor) -> None:
    """Stream on several ranks, which also use their group as models do."""
    distributed.init_process_group("gloo")
    count, read = distributed.get_world_size(), {}
    for way in ("always", "never"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for layer in model.model.layers:
            layer.register_forward_hook(lambda _, inputs, output: reduce(output))
        stream = ucp.stream(model, f"dp={count}", folder, exchange=way, threads=1)
        for _ in range(PASSES):
            assert torch.equal(logits(model), expected)
        assert torch.equal(generate(model), text)
        stream.close()  # with what is being read
        assert len(distributed.distributed_c10d._world.pg_map) == 1  # that of the model alone
        read[way] = stream.nbytes_read
    ranks: list[object] = [None] * count
    distributed.all_gather_object(ranks, read)
    if distributed.get_rank() == 0:
        print(json.dumps({"ranks": ranks, "layers": stream.nbytes}))
    distributed.destroy_process_group()


def reduce(output: object) -> None:
    """Let ranks use the group of the model in each layer."""
    flag = torch.ones(1)
    distributed.all_reduce(flag)
    assert flag == distributed.get_world_size()


@torch.no_grad()
def generate(model: nn.Module) -> Tensor:
    """Twenty tokens, greedily, with a cache of keys and values."""
    tokens = torch.arange(6)[None]
    return model.generate(tokens, max_new_tokens=20, do_sample=False, use_cache=True, pad_token_id=0, eos_token_id=None)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    tokens = torch.randint(0, 512, (1, 6), generator=torch.Generator().manual_seed(1))
    return model(input_ids=tokens).logits


if __name__ == "__main__":
    main()
