"""Train with Lightning over FSDP2 and save a distributed checkpoint; or go on from one.

Losses of the second epoch go to a file per rank.

python lightning_worker.py --ranks 2 --save ckpt --out OUT
python lightning_worker.py --ranks 1 --resume ckpt --out OUT
python lightning_worker.py --ranks 3 --resume ckpt --out OUT --hook [--whole]

With --hook the checkpoint is loaded by `ucp.integrations.lightning`, or saved by `ucp.save`; with --whole the model is
whole on every rank (DDP).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import ucp

ROWS = 12


class Module(lightning.LightningModule):
    def __init__(self, seed: int, ranks: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 3))
        self.rows = ROWS // ranks
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.device_mesh is None:
            return
        mesh = self.device_mesh["data_parallel"]
        for own in (self.net[0], self.net):
            fully_shard(own, mesh=mesh)

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    def train_dataloader(self) -> DataLoader[Any]:
        data = torch.randn(4 * ROWS, 7, generator=torch.Generator().manual_seed(0))
        return DataLoader(data, batch_size=self.rows, shuffle=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--hook", action="store_true")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    module = Module(seed=1 if options.resume else 0, ranks=options.ranks)
    counter = Counter()
    callbacks = [counter, *([Saver(options.save, with_ucp=options.hook)] if options.save else [])]
    if options.hook and options.resume:
        from ucp.integrations.lightning import ResumeFrom

        callbacks.append(ResumeFrom(options.resume))
    sharded = ModelParallelStrategy(data_parallel_size=options.ranks, tensor_parallel_size=1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy="ddp" if options.whole else sharded,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(module, ckpt_path=None if options.hook else options.resume)
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"losses": module.losses, "lr": trainer.optimizers[0].param_groups[0]["lr"], "step": trainer.global_step}
    report["batches"] = counter.batches
    (options.out / f"{trainer.global_rank}.json").write_text(json.dumps(report))


class Saver(lightning.Callback):
    """Saves after the first epoch, as Lightning's own ModelCheckpoint does."""

    def __init__(self, folder: Path, *, with_ucp: bool) -> None:
        self.folder, self.with_ucp = folder, with_ucp

    def on_train_epoch_end(self, trainer: lightning.Trainer, module: Module) -> None:  # type: ignore[override]
        if trainer.current_epoch == 0:
            module.losses.clear()
            if self.with_ucp:
                (optimizer,), (schedule,) = trainer.optimizers, trainer.lr_scheduler_configs
                ucp.save(module, optimizer, None, self.folder, scheduler=schedule.scheduler)
            else:
                trainer.save_checkpoint(self.folder)


class Counter(lightning.Callback):
    """Counts batches, and goes on to count."""

    batches = 0

    def on_train_batch_end(self, *args: object) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Tensor]:
        return {"batches": torch.tensor(self.batches)}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        self.batches = state_dict["batches"].item()


if __name__ == "__main__":
    main()
