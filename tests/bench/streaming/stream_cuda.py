"""On a CUDA machine: a model that is streamed to the GPU, beside the whole model on it, and accelerate's offloading.

    python tests/bench/streaming/stream_cuda.py [--kind mixture|dense] [--gigabytes 6] [--tokens 8] [--rounds 5]

Outputs must be those of the whole model, bit for bit: exits with 1 if they differ. Prints the median of a pass of each
way, which take turns; the memory of the GPU that each took; and what the formula of the ring says: max(compute, read).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import ucp

WIDTH, HIDDEN, EXPERTS, TOP = 2048, 4096, 16, 2
_Ways: TypeAlias = "dict[str, tuple[Callable[[Tensor], Any], int]]"
"""Each way with what computes a pass, and the bytes of the GPU that it keeps."""


class Experts(nn.Module):
    """Stacked experts, taken one by one, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH).normal_(std=0.02))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN).normal_(std=0.02))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in chosen.unique():
            token, place = torch.where(chosen == expert)
            hidden = nn.functional.silu(nn.functional.linear(x[token], self.gate_up_proj[expert]))
            rows = nn.functional.linear(hidden, self.down_proj[expert]) * weights[token, place, None]
            out.index_put_((token,), out[token] + rows)
        return out


class Dense(nn.Module):
    """What a layer without experts has in their place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * HIDDEN, bias=False), nn.Linear(8 * HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        del chosen
        return self.down(nn.functional.silu(self.up(x))) * weights[:, :1]


class Layer(nn.Module):
    """Attention without a mask, and experts."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts() if kind == "mixture" else Dense()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(len(x), 16, -1).transpose(0, 1).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(x.shape))
        weights, chosen = self.gate(self.norm(x)).softmax(-1).topk(TOP)
        return x + self.experts(self.norm(x), chosen, weights)


class Model(nn.Module):
    """Layers."""

    def __init__(self, kind: str, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("mixture", "dense"), default="mixture")
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(mode=False)
    device = torch.device(asked.device, 0) if asked.device == "cuda" else torch.device("cpu")
    with torch.device("meta"):
        per_layer = sum(2 * param.numel() for param in Layer(asked.kind).parameters())
    count = max(3, round(asked.gigabytes * 1e9 / per_layer))
    size = count * per_layer
    with torch.device(device):
        whole = Model(asked.kind, count).to(torch.bfloat16)
        x = torch.randn(asked.tokens, WIDTH, dtype=torch.bfloat16)
    expected = whole(x)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(whole.state_dict(), Path(folder) / "model.pt")
        ways, stream = _prepare(whole, Path(folder), size, device)
        held: dict[str, int] = {}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        peaks, wrong = dict.fromkeys(ways, 0), set()
        for way, (model, nbytes) in ways.items():
            before = _allocated(device)
            output = model(x)
            if way != "reading" and not torch.equal(output, expected):
                wrong.add(way)
            held[way] = nbytes + _allocated(device) - before
        for _ in range(asked.rounds):
            for way, (model, _) in ways.items():
                taken, peak = _measure(lambda model=model: model(x), device)  # type: ignore[misc]  # a default
                seconds[way].append(taken)
                peaks[way] = max(peaks[way], peak + held[way])
        medians = {way: median(of_way) for way, of_way in seconds.items()}
        print(f"{asked.kind}, {count} layers, {size / 1e9:.2f} GB, {asked.tokens} tokens")
        for way, taken in medians.items():
            print(
                f"  {way:<13} {taken:.4f} s a pass ({min(seconds[way]):.4f} to {max(seconds[way]):.4f}), "
                f"{peaks[way] / 1e9:.2f} GB of the GPU{', WRONG' if way in wrong else ''}"
            )
        bound = max(medians["whole"], medians["reading"])
        if asked.kind == "dense":  # experts are read once their layer has chosen them, not ahead
            print(f"  ucp.stream: {medians['ucp.stream'] / bound:.2f} of max(compute, read)")
        print(stream)
        stream.close()
    sys.exit(bool(wrong))


def _prepare(whole: nn.Module, folder: Path, size: int, device: torch.device) -> tuple[_Ways, ucp.Stream]:
    """All ways."""
    ways: _Ways = {"whole": (whole, size)}
    empty = deepcopy(whole).to("meta")
    before = _allocated(device)
    streamed = deepcopy(empty)
    stream = ucp.stream(streamed, folder / "model.pt", slots=2, cache_nbytes=size // 4)
    ways["ucp.stream"] = streamed, _allocated(device) - before

    def read(_: Tensor) -> None:
        for layer in range(stream.layers):
            stream._ring.enter(layer)
            stream._ring.leave(layer)

    ways["reading"] = read, 0
    try:
        import accelerate
        from accelerate.utils import offload_state_dict
    except ImportError:
        return ways, stream
    state = {name: tensor.cpu() for name, tensor in whole.state_dict().items()}
    offload_state_dict(folder / "offload", state)
    model = accelerate.disk_offload(deepcopy(empty), folder / "offload", execution_device=device)
    ways["disk_offload"] = model, 0
    ways["cpu_offload"] = accelerate.cpu_offload(deepcopy(empty), device, state_dict=state), 0
    return ways, stream


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _measure(work: Callable[[], object], device: torch.device) -> tuple[float, int]:
    """Seconds, and bytes of the GPU that it took beside what was there."""
    before = _allocated(device)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    taken = time.perf_counter() - began
    return taken, torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0


if __name__ == "__main__":
    main()
