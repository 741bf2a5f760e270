"""A model of transformers that computes while it is read.

    python worker.py make dense|mixture FOLDER
    python worker.py whole|reading|ucp|disk_offload FOLDER cache|disk TOKENS

Prints a line of JSON: seconds of a pass (the median), and the most private memory. `reading` reads what a pass of `ucp`
reads, and computes nothing. Exits with an error if logits are not those of the whole model.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from copy import deepcopy
from pathlib import Path
from statistics import median

import accelerate
import torch
import transformers
from accelerate.utils import offload_state_dict
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import ucp
from ucp.streaming.experts import Choice

SIZES = {"vocab_size": 1024, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}
MODELS = {
    "dense": lambda: transformers.LlamaConfig(**SIZES, intermediate_size=4096, num_hidden_layers=16),
    "mixture": lambda: transformers.MixtralConfig(
        **SIZES, intermediate_size=2048, num_hidden_layers=8, num_local_experts=8
    ),
}
PASSES = 5
SLOTS = 2


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if sys.argv[1] == "make":
        make(sys.argv[2], Path(sys.argv[3]))
        return
    way, folder, medium, count = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    peak = watch()
    tokens = torch.randint(0, 1024, (1, count), generator=torch.Generator().manual_seed(1))
    model, stream = prepare(way, folder)
    files = [*folder.glob("*.safetensors")] if way != "disk_offload" else [*(folder / "offload").glob("*.dat")]
    choices = record_choices() if way == "reading" else []
    check(folder / f"logits-{count}.pt", model(input_ids=tokens, use_cache=False).logits, way)
    chosen = list(choices)
    seconds = []
    for _ in range(PASSES):
        if medium == "disk":
            drop(files)
        began = time.perf_counter()
        if way == "reading":
            read(stream, chosen)
        else:
            model(input_ids=tokens, use_cache=False)
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"seconds": median(seconds), "peak": peak[0]}), flush=True)
    os._exit(0)


def prepare(way: str, folder: Path) -> tuple[nn.Module, ucp.Stream | None]:
    """The model, and what streams it."""
    config = AutoConfig.from_pretrained(folder)
    has_experts = hasattr(config, "num_local_experts")
    if way == "whole":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for param in model.parameters():
            param.data = param.data.clone()  # in memory, not in the file
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if has_experts:
        model.set_experts_implementation("eager")
    if way == "disk_offload":
        small = deepcopy(config)
        small.num_hidden_layers = 1
        for name, buffer in AutoModelForCausalLM.from_config(small).named_buffers():  # which the folder does not have
            owner, _, key = name.rpartition(".")
            model.get_submodule(owner).register_buffer(key, buffer, persistent=False)
        return accelerate.disk_offload(model, folder / "offload", execution_device=torch.device("cpu")), None
    if way == "whole":
        return model, None
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return model, ucp.stream(model, folder, slots=SLOTS, cache_nbytes=size // 4, threads=1)


def record_choices() -> list[tuple[Choice, list[int]]]:
    """The experts of each layer that a pass needs, filled while it runs."""
    choices = []
    begin = Choice.begin

    def record(choice: Choice, numbers: list[int]) -> None:
        choices.append((choice, numbers))
        begin(choice, numbers)

    Choice.begin = record
    return choices


def read(stream: ucp.Stream, chosen: list[tuple[Choice, list[int]]]) -> None:
    """Read what a pass reads."""
    for layer in range(stream.layers):
        stream._ring.enter(layer)
        if chosen:
            choice, numbers = chosen[layer]
            choice.begin(numbers)
            for number in numbers:
                choice.get(number).wait()
            choice.end()
        stream._ring.leave(layer)


def check(path: Path, logits: torch.Tensor, way: str) -> None:
    if way == "whole":
        torch.save(logits, path)
    elif path.exists() and not torch.equal(torch.load(path), logits):
        sys.exit(f"{way}: other logits than the whole model")


def watch() -> list[int]:
    """The most private bytes so far, kept up to date."""
    peak = [0]

    def look() -> None:
        while True:
            status = Path("/proc/self/status").read_text()
            peak[0] = max(peak[0], *(int(line.split()[1]) << 10 for line in status.splitlines() if "RssAnon" in line))
            time.sleep(0.02)

    threading.Thread(target=look, daemon=True).start()
    return peak


def drop(files: list[Path]) -> None:
    """Drop files from the page cache."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def make(name: str, folder: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name]()).eval()
    model.save_pretrained(folder)
    offload_state_dict(folder / "offload", model.state_dict())
    os.sync()
    print("{}")


if __name__ == "__main__":
    main()
