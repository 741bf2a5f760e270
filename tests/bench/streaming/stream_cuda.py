"""On a CUDA machine: a mixture-of-experts model that is streamed to the GPU, beside the whole model on it.

    python tests/bench/streaming/stream_cuda.py [--gigabytes 4] [--passes 4] [--device cuda]

The outputs must be those of the whole model, bit for bit: exits with 1 if they differ. Prints the time of a pass, the
memory of the GPU, and what the formula of the ring says: max(compute, read) of a layer, times the layers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import ucp

WIDTH, HIDDEN, EXPERTS, TOP = 2048, 4096, 16, 2


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


class Layer(nn.Module):
    """Attention without a mask, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(len(x), 16, -1).transpose(0, 1).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(x.shape))
        weights, chosen = self.gate(self.norm(x)).softmax(-1).topk(TOP)
        return x + self.experts(self.norm(x), chosen, weights)


class Model(nn.Module):
    """Layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    per_layer = 2 * (2 * EXPERTS * HIDDEN * WIDTH + 4 * WIDTH * WIDTH)
    count = max(3, round(asked.gigabytes * 1e9 / per_layer))
    device = torch.device(asked.device, 0) if asked.device == "cuda" else torch.device("cpu")
    with torch.device(device):
        model = Model(count).to(torch.bfloat16)
    x = torch.randn(asked.tokens, WIDTH, dtype=torch.bfloat16, device=device)
    expected = model(x)
    whole = timed(lambda: model(x), asked.passes, device)
    size = sum(param.nbytes for param in model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), Path(folder) / "model.pt")
        model.to("cpu")
        with torch.device("meta"):
            streamed = Model(count).to(torch.bfloat16)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        stream = ucp.stream(streamed, Path(folder) / "model.pt", slots=2, cache_nbytes=size // 4)
        same = [torch.equal(streamed(x), expected) for _ in range(3)]
        seconds = timed(lambda: streamed(x), asked.passes, device)
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        print(
            f"{count} layers, {size / 1e9:.2f} GB; whole model: {whole:.3f} s a pass; streamed: {seconds:.3f} s, "
            f"{peak / 1e9:.2f} GB of the GPU at most; equal: {same}\n{stream}"
        )
        stream.close()
    sys.exit(not all(same))


def timed(function: object, passes: int, device: torch.device) -> float:
    """Seconds of a call, the mean."""
    began = time.perf_counter()
    for _ in range(passes):
        function()  # type: ignore[operator]  # a function
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / passes


if __name__ == "__main__":
    main()
