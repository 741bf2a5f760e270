"""Resume a script of accelerate from any checkpoint.

    from ucp.integrations.accelerate import load_state

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    load_state(accelerator, "ckpt/global_step1000")  # in place of accelerator.load_state

Tested with accelerate 1.15.0, over DDP, FSDP2 and DeepSpeed 0.19.8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from ucp.conversion.option import type_path
from ucp.errors import UsageError
from ucp.integrations.run import ResumeArguments, load_run
from ucp.live.report import LoadReport
from ucp.log import LOGGER

if TYPE_CHECKING:
    from accelerate import Accelerator


def load_state(
    accelerator: Accelerator, checkpoint: type_path | None = None, **options: Unpack[ResumeArguments]
) -> LoadReport:
    """Load model, optimizer, scheduler, loss scale and registered objects, after `accelerator.prepare`. Collective.

    `checkpoint`: by default the one that UCP_CHECKPOINT names.

    An object that was registered with `register_for_checkpointing` gets what accelerate saved of the object with the
    same number. If the checkpoint has nothing for it, it keeps its state and a warning is logged. Positions of data
    loaders are not restored. `options`: see `ucp.load_into`; `rank_extras="carry"` restores the RNG states of every
    rank, if as many ranks saved. Raises as `load_into`.
    """
    if not hasattr(accelerator, "_models"):
        raise UsageError(f"expected the Accelerator that prepared the run; got a {type(accelerator).__name__}")
    report = load_run(
        checkpoint,
        accelerator._models,  # noqa: SLF001  # where `accelerator.load_state` takes them from
        accelerator._optimizers,  # noqa: SLF001
        accelerator._schedulers,  # noqa: SLF001
        scaler=accelerator.scaler,
        **options,
    )
    for number, registered in enumerate(accelerator._custom_objects):  # noqa: SLF001
        name = f"companion/custom_checkpoint_{number}.pkl"
        if name in report.saved.extras:
            registered.load_state_dict(report.saved.extra(name))
        else:
            LOGGER.warning("%s keeps its state: the checkpoint has no %s", type(registered).__name__, name)
    return report
