"""Resume the workers of Ray Train from any checkpoint, with any number of them.

    from ucp.integrations.ray_train import resume

    def train(config):
        model = ray.train.torch.prepare_model(Model())
        optimizer = torch.optim.AdamW(model.parameters())
        report = resume(model, optimizer, "ckpt/global_step1000")
        step = report.step if report else 0

Tested with ray 2.60.0: TorchTrainer, over DDP and FSDP2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from ucp.conversion.option import type_path
from ucp.integrations.run import ResumeArguments, import_library, load_run
from ucp.live.report import LoadReport

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def resume(
    model: nn.Module,
    optimizer: Optimizer | None,
    checkpoint: type_path | None = None,
    *,
    scheduler: object = None,
    scaler: object = None,
    **options: Unpack[ResumeArguments],
) -> LoadReport | None:
    """Load the newest checkpoint that this run reported, or else `checkpoint`; None without either. Collective.

    When Ray Train starts workers again after a failure, or with another number of them, the run has reported
    checkpoints, and goes on from the newest. These may have any format that `ucp` reads: what `ucp.save`,
    `torch.distributed.checkpoint` or DeepSpeed saved in the folder that was reported. `options`: see `ucp.load_into`,
    which must be possible on every worker, and which says what is raised.
    """
    objects = ([model], [] if optimizer is None else [optimizer], [] if scheduler is None else [scheduler])
    reported = import_library("ray.train").get_checkpoint()
    if reported is not None:
        with reported.as_directory() as folder:
            return load_run(folder, *objects, scaler=scaler, **options)
    return None if checkpoint is None else load_run(checkpoint, *objects, scaler=scaler, **options)
