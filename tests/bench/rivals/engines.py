"""The same model under FSDP2 and under DeepSpeed: built, stepped once, saved, and loaded by its project or by ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ucp

__all__ = ["ENGINES", "Engine"]

WIDTH, HEADS, BATCH = 1024, 8, 2


class Engine:
    """A run of `layers` transformer layers, about 12.6M parameters each, under AdamW."""

    def __init__(self, layers: int, *, is_universal: bool) -> None:
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Take a step and save."""
        raise NotImplementedError

    def theirs(self, folder: Path) -> None:
        """Load as the project does."""
        raise NotImplementedError

    def ours(self, folder: Path) -> Mapping[str, float]:
        """Load with `ucp.load_into`; seconds of its stages."""
        raise NotImplementedError

    def states(self) -> Iterator[torch.Tensor]:
        """Masters and moments, whole or this rank's part, in the same order on every run. Collective."""
        raise NotImplementedError

    def nbytes_needed(self) -> int:
        """Bytes that a load adds on this rank for good."""
        raise NotImplementedError


def _model(layers: int) -> nn.Module:
    torch.manual_seed(0)
    some = [nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(layers)]
    return nn.Sequential(*some)


class Fsdp2(Engine):
    """FSDP2 in fp32, and `torch.distributed.checkpoint`."""

    def __init__(self, layers: int, *, is_universal: bool) -> None:
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        self._model = _model(layers)
        for layer in self._model.children():
            fully_shard(layer)
        fully_shard(self._model)
        self._optimizer = torch.optim.AdamW(self._model.parameters())

    def save(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        self._model(torch.randn(BATCH, 4, WIDTH)).square().mean().backward()
        self._optimizer.step()
        weights, states = get_state_dict(self._model, self._optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)

    def theirs(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        weights, states = get_state_dict(self._model, self._optimizer)
        state = {"model": weights, "optimizer": states}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self._model, self._optimizer, model_state_dict=weights, optim_state_dict=state["optimizer"])

    def ours(self, folder: Path) -> Mapping[str, float]:
        return ucp.load_into(self._model, checkpoint=folder, optimizer=self._optimizer).stages

    def states(self) -> Iterator[torch.Tensor]:
        for param in self._model.parameters():
            own = self._optimizer.state[param]
            for tensor in (param, own["exp_avg"], own["exp_avg_sq"]):
                yield tensor.detach().to_local()  # type: ignore[attr-defined]  # a DTensor

    def nbytes_needed(self) -> int:
        return 2 * sum(param.to_local().nbytes for param in self._model.parameters())  # type: ignore[attr-defined]


class DeepSpeed(Engine):
    """DeepSpeed in bf16, and its universal checkpoints."""

    stage: int
    """Of ZeRO."""

    def __init__(self, layers: int, *, is_universal: bool) -> None:
        import deepspeed

        deepspeed.init_distributed("gloo")
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": self.stage},
            "checkpoint": {"load_universal": is_universal},
        }
        model = _model(layers)
        self._engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def save(self, folder: Path) -> None:
        self._engine.backward(self._engine(torch.randn(BATCH, 4, WIDTH).bfloat16()).square().mean())
        self._engine.step()
        self._engine.save_checkpoint(folder)

    def theirs(self, folder: Path) -> None:
        if self._engine.load_checkpoint(folder)[0] is None:
            raise FileNotFoundError(folder)

    def ours(self, folder: Path) -> Mapping[str, float]:
        return ucp.load_into(self._engine, checkpoint=folder).stages

    def states(self) -> Iterator[torch.Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        for param in self._engine.module.parameters():
            yield safe_get_full_fp32_param(param)
            for state in ("exp_avg", "exp_avg_sq"):
                yield safe_get_full_optimizer_state(param, state)

    def nbytes_needed(self) -> int:
        return 0  # DeepSpeed makes all states when it starts


class Zero1(DeepSpeed):
    stage = 1


class Zero2(DeepSpeed):
    stage = 2


class Zero3(DeepSpeed):
    stage = 3


ENGINES: Mapping[str, Callable[..., Engine]] = {"fsdp2": Fsdp2, "zero1": Zero1, "zero2": Zero2, "zero3": Zero3}
