"""One rank of a run of the Hugging Face Trainer, or of accelerate, over DeepSpeed: trains, saves, resumes, trains on.

    torchrun --nproc-per-node 2 trainer_worker.py trainer|accelerate OUT --stage 2 --save CHECKPOINTS
    torchrun --nproc-per-node 1 trainer_worker.py trainer|accelerate OUT --stage 1 --resume CHECKPOINT [--universal]

Rank 0 writes the losses by step, the rates, and what else was restored, to OUT. The batch of all ranks is the same for
any number of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

BATCH, SAVED, STEPS = 4, 3, 6
"""Samples of a step over all ranks, the step that is saved, the last step."""


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("script", choices=["trainer", "accelerate"])
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--stage", type=int, required=True)
    arguments.add_argument("--save", type=Path)
    arguments.add_argument("--resume", type=Path)
    arguments.add_argument("--universal", action="store_true")
    asked = arguments.parse_args()
    set_seed(1 if asked.resume is None else 2)  # what is not restored, shows
    told = {"trainer": with_trainer, "accelerate": with_accelerate}[asked.script](asked)
    if os.environ["RANK"] == "0":
        asked.out.write_text(json.dumps(told))


def with_trainer(asked: argparse.Namespace) -> dict[str, object]:
    training = TrainingArguments(
        output_dir=str(asked.save or asked.out.with_suffix(".folder")),
        per_device_train_batch_size=_share(),
        max_steps=STEPS,
        save_steps=SAVED,
        logging_steps=1,
        lr_scheduler_type="linear",
        learning_rate=0.01,
        deepspeed=_config(asked),
        use_cpu=True,
        seed=7,
        data_seed=7,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=_model(), args=training, train_dataset=_dataset())
    trainer.train(resume_from_checkpoint=None if asked.resume is None else str(asked.resume))
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": {entry["step"]: entry["loss"] for entry in history},
        "rates": {entry["step"]: entry["learning_rate"] for entry in history},
    }


def with_accelerate(asked: argparse.Namespace) -> dict[str, object]:
    from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin, PartialState

    PartialState(cpu=True)  # gloo between all ranks; Accelerator(cpu=True) would do without DeepSpeed
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=_config(asked)),
        dataloader_config=DataLoaderConfiguration(
            split_batches=True
        ),  # the scheduler steps once, on any number of ranks
    )
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
    loader = DataLoader(_dataset(), batch_size=BATCH)
    counter = _Counter()
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.register_for_checkpointing(counter)
    if asked.resume is not None:
        accelerator.load_state(str(asked.resume))
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
    return {**told, "random": random.random()}  # drawn to be compared


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


def _config(asked: argparse.Namespace) -> dict[str, object]:
    return {
        "zero_optimization": {"stage": asked.stage},
        "train_micro_batch_size_per_gpu": _share(),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": asked.universal},
    }


def _model() -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


def _dataset() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(0, 64, (BATCH * STEPS * 2, 12), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


if __name__ == "__main__":
    main()
