"""The same model under FSDP2 and under DeepSpeed: stepped and saved, or loaded by its own project or by ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

import ucp

WIDTH, HEADS, BATCH = 1024, 8, (2, 4)


class Engine(Protocol):
    """A run of a few transformer layers, of 12.6M parameters each, under AdamW."""

    def save(self, folder: Path) -> None:
        """Take a step and save."""

    def load(self, folder: Path) -> None:
        """Load as the project does."""

    def load_live(self, folder: Path) -> Mapping[str, float]:
        """Load with `ucp.load_into`; seconds of its stages."""

    def states(self) -> Iterator[torch.Tensor]:
        """Masters and moments, in the same order in every run. Collective."""


def _model(layers: int) -> nn.Module:
    torch.manual_seed(0)
    some = [nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(layers)]
    return nn.Sequential(*some)


class _Fsdp2:
    """FSDP2 in fp32, and `torch.distributed.checkpoint`."""

    def __init__(self, layers: int, *, is_universal: bool) -> None:
        from torch.distributed.fsdp import fully_shard

        del is_universal  # a word of DeepSpeed's
        dist.init_process_group("gloo")
        self._model = _model(layers)
        for layer in (*self._model.children(), self._model):
            fully_shard(layer)
        self._optimizer = torch.optim.AdamW(self._model.parameters())

    def save(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        self._model(torch.randn(*BATCH, WIDTH)).square().mean().backward()
        self._optimizer.step()
        weights, states = get_state_dict(self._model, self._optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        weights, states = get_state_dict(self._model, self._optimizer)
        state = {"model": weights, "optimizer": states}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self._model, self._optimizer, model_state_dict=weights, optim_state_dict=state["optimizer"])

    def load_live(self, folder: Path) -> Mapping[str, float]:
        return ucp.load_into(self._model, checkpoint=folder, optimizer=self._optimizer).stages

    def states(self) -> Iterator[torch.Tensor]:
        for param in self._model.parameters():
            own = self._optimizer.state[param]
            for tensor in (param, own["exp_avg"], own["exp_avg_sq"]):
                yield tensor.detach().to_local()  # type: ignore[attr-defined]  # a DTensor


class _DeepSpeed:
    """ZeRO in bf16, and DeepSpeed's universal checkpoints."""

    def __init__(self, layers: int, *, is_universal: bool, stage: int) -> None:
        import deepspeed

        deepspeed.init_distributed("gloo")
        config = {
            "train_micro_batch_size_per_gpu": BATCH[0],
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
            "checkpoint": {"load_universal": is_universal},
        }
        model = _model(layers)
        self._engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def save(self, folder: Path) -> None:
        self._engine.backward(self._engine(torch.randn(*BATCH, WIDTH).bfloat16()).square().mean())
        self._engine.step()
        self._engine.save_checkpoint(folder)

    def load(self, folder: Path) -> None:
        if self._engine.load_checkpoint(folder)[0] is None:
            raise FileNotFoundError(folder)

    def load_live(self, folder: Path) -> Mapping[str, float]:
        return ucp.load_into(self._engine, checkpoint=folder).stages

    def states(self) -> Iterator[torch.Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        for param in self._engine.module.parameters():
            yield safe_get_full_fp32_param(param)
            yield from (safe_get_full_optimizer_state(param, state) for state in ("exp_avg", "exp_avg_sq"))


ENGINES = {"fsdp2": _Fsdp2, **{f"zero{stage}": partial(_DeepSpeed, stage=stage) for stage in (1, 2, 3)}}
