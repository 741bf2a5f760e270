"""One rank of a run of the Hugging Face Trainer, or of accelerate, over DeepSpeed or FSDP: trains, saves, resumes.

    torchrun --nproc-per-node 2 client_worker.py trainer|accelerate OUT --stage 2 --save CHECKPOINTS
    torchrun --nproc-per-node 1 client_worker.py trainer|accelerate OUT --stage 1 --resume CHECKPOINT [--universal]
    torchrun --nproc-per-node 4 client_worker.py trainer|accelerate OUT --fsdp 2 --resume CHECKPOINT
    torchrun --nproc-per-node 4 client_worker.py trainer|accelerate OUT --fsdp 2 --resume CHECKPOINT --hook

Without --stage and --fsdp the model is whole on every rank (DDP). With --hook the checkpoint, of whatever framework, is
loaded by `ucp.integrations`.

Rank 0 writes the losses by step, the rates, and what else was restored, to OUT; all that the model and the
optimizer held right after the checkpoint was loaded, or when it was saved, to OUT.safetensors. The batch of all ranks
is the same for any number of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

_FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"
BATCH, SAVED, STEPS = 4, 3, 6
"""Samples of a step over all ranks, the step that is saved, the last step."""


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("script", choices=["trainer", "accelerate"])
    arguments.add_argument("out", type=Path)
    framework = arguments.add_mutually_exclusive_group()
    framework.add_argument("--stage", type=int, help="DeepSpeed, ZeRO of this stage")
    framework.add_argument("--fsdp", type=int, help="FSDP of this version")
    arguments.add_argument("--save", type=Path)
    arguments.add_argument("--resume", type=Path)
    arguments.add_argument("--hook", action="store_true", help="resume by ucp.integrations")
    arguments.add_argument("--schedule", choices=["restore", "advance"], default="restore", help="with --hook")
    arguments.add_argument("--universal", action="store_true")
    arguments.add_argument(
        "--samples", type=int, default=BATCH * STEPS * 2, help="of the data: fewer are several epochs"
    )
    arguments.add_argument("--accumulate", type=int, default=1, help="batches of a step")
    arguments.add_argument("--tied", action="store_true", help="one matrix for the embedding and the head")
    asked = arguments.parse_args()
    set_seed(1 if asked.resume is None else 2)  # what is not restored, shows
    told = {"trainer": with_trainer, "accelerate": with_accelerate}[asked.script](asked)
    if os.environ["RANK"] == "0":
        asked.out.write_text(json.dumps(told))
    torch.distributed.barrier()
    os._exit(0)  # at times torch's own threads abort the process while Python takes it down (torch 2.13, on CPUs)


def with_trainer(asked: argparse.Namespace) -> dict[str, object]:
    training = TrainingArguments(
        output_dir=str(asked.save or asked.out.with_suffix(".folder")),
        per_device_train_batch_size=_share() // asked.accumulate,
        gradient_accumulation_steps=asked.accumulate,
        max_steps=STEPS,
        save_steps=SAVED,
        logging_steps=1,
        lr_scheduler_type="linear",
        learning_rate=0.01,
        weight_decay=0.1,
        **_framework(asked),
        use_cpu=True,
        seed=7,
        data_seed=7,
        report_to=[],
        disable_tqdm=True,
    )
    if asked.fsdp and training.device.type == "cpu":
        _take_for_gpus()
    trainer = Trainer(model=_model(asked), args=training, train_dataset=_dataset(asked))
    if asked.hook:
        from ucp.integrations.transformers import accept_any_checkpoint

        trainer = accept_any_checkpoint(trainer, schedule=asked.schedule)
    trainer.add_callback(_Watch(trainer, asked))
    trainer.train(resume_from_checkpoint=None if asked.resume is None else str(asked.resume))
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": {entry["step"]: entry["loss"] for entry in history},
        "rates": {entry["step"]: entry["learning_rate"] for entry in history},
        "epochs": {entry["step"]: entry["epoch"] for entry in history},
    }


def with_accelerate(asked: argparse.Namespace) -> dict[str, object]:
    from accelerate import Accelerator, DataLoaderConfiguration, PartialState

    PartialState(cpu=True)  # gloo between all ranks; Accelerator(cpu=True) would do without DeepSpeed
    if asked.fsdp:
        _take_for_gpus()
    accelerator = Accelerator(
        **_plugin(asked),
        dataloader_config=DataLoaderConfiguration(
            split_batches=True
        ),  # the scheduler steps once, on any number of ranks
    )
    model = _model(asked)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
    loader = DataLoader(_dataset(asked), batch_size=BATCH)
    counter = _Counter()
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.register_for_checkpointing(counter)
    if asked.hook:
        from ucp.integrations.accelerate import load_state

        load_state(accelerator, asked.resume)
    elif asked.resume is not None:
        accelerator.load_state(str(asked.resume))
    if asked.resume is not None:
        _tell_held(model, optimizer, asked)
    told: dict[str, dict[int, float]] = {"losses": {}, "rates": {}}
    done = counter.steps
    for number, batch in enumerate(loader):
        if number < done or number >= STEPS:
            continue
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        counter.steps += 1
        told["losses"][number + 1] = accelerator.reduce(loss.detach(), "mean").item()
        told["rates"][number + 1] = scheduler.get_last_lr()[0]
        if asked.save is not None and counter.steps == SAVED:
            accelerator.save_state(str(asked.save))
            _tell_held(model, optimizer, asked)
    return {**told, "random": random.random()}  # drawn to be compared


def _take_for_gpus() -> None:
    """Have accelerate 1.15 take ranks on CPUs for ones on GPUs: it turns FSDP on for these alone (`state.py`)."""
    from accelerate import DistributedType, PartialState

    PartialState._shared_state |= {"distributed_type": DistributedType.MULTI_GPU, "device": torch.device("cpu")}


class _Watch(TrainerCallback):
    """Tells what a run of the Trainer holds when it has loaded or saved."""

    def __init__(self, trainer: Trainer, asked: argparse.Namespace) -> None:
        self._trainer = trainer
        self._asked = asked

    def on_train_begin(self, *args: object, **run: object) -> None:
        if self._asked.resume is not None:
            _tell_held(self._trainer.model_wrapped, self._trainer.optimizer, self._asked)

    def on_save(self, *args: object, **run: object) -> None:
        if self._asked.save is not None and self._trainer.state.global_step == SAVED:
            _tell_held(self._trainer.model_wrapped, self._trainer.optimizer, self._asked)


def _tell_held(model: torch.nn.Module, optimizer: Any, asked: argparse.Namespace) -> None:
    """Write every weight and optimizer state, whole, in fp32."""
    inner = getattr(optimizer, "optimizer", optimizer)  # of accelerate's
    deepspeed = asked.stage is not None
    held = _held_by_deepspeed(model) if deepspeed else _held_by_torch(model, inner, asked.out.with_suffix(".held"))
    if os.environ["RANK"] == "0":
        save_file({name: own.clone().float() for name, own in held.items()}, asked.out.with_suffix(".safetensors"))


def _held_by_torch(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> dict[str, torch.Tensor]:
    """What torch saves and reads back: FSDP1 crashes when it gathers on CPUs (torch 2.13)."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, states = get_state_dict(model, optimizer)
    dcp.save({"weights": weights, "states": states["state"]}, checkpoint_id=folder)
    if os.environ["RANK"] != "0":
        return {}
    dcp_to_torch_save(folder, folder / "whole.pt")
    whole = torch.load(folder / "whole.pt", weights_only=True)
    found = {f"{name}/weight": own for name, own in whole["weights"].items()}
    for name, own in whole["states"].items():
        found |= {f"{name}/{state}": value for state, value in own.items()}
    return found


def _held_by_deepspeed(engine: torch.nn.Module) -> dict[str, torch.Tensor]:
    sys.path.insert(0, str(_FIXTURES / "make" / "deepspeed"))
    from deepspeed_truth import gather

    return {name: own for name, own in gather(engine).tensors.items() if not name.endswith("/module")}


class _Counter:
    """An object of the script's own that goes with the checkpoint."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        self.steps = saved["steps"]


def _share() -> int:
    """Samples of a step on each rank."""
    return BATCH // int(os.environ["WORLD_SIZE"])


def _framework(asked: argparse.Namespace) -> dict[str, Any]:
    """Arguments of the Trainer."""
    if asked.stage is not None:
        return {"deepspeed": _config(asked)}
    if not asked.fsdp:
        return {}
    wrapped = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    kept = {"state_dict_type": "SHARDED_STATE_DICT"} | ({"sync_module_states": False} if asked.fsdp == 1 else {})
    return {"fsdp": True, "fsdp_config": {"version": asked.fsdp, **kept, **wrapped}}


def _plugin(asked: argparse.Namespace) -> dict[str, Any]:
    """Arguments of accelerate."""
    from accelerate import DeepSpeedPlugin, FullyShardedDataParallelPlugin

    if asked.stage is not None:
        return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=_config(asked))}
    if not asked.fsdp:
        return {}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=asked.fsdp,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        use_orig_params=True if asked.fsdp == 1 else None,
    )
    return {"fsdp_plugin": plugin}


def _config(asked: argparse.Namespace) -> dict[str, Any]:
    """Settings of DeepSpeed."""
    return {
        "zero_optimization": {"stage": asked.stage},
        "train_micro_batch_size_per_gpu": _share(),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": asked.universal},
    }


def _model(asked: argparse.Namespace) -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=66,
        tie_word_embeddings=asked.tied,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


def _dataset(asked: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(0, 66, (asked.samples, 12), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


if __name__ == "__main__":
    main()
