"""Everything in a Megatron checkpoint that is no tensor of a parameter: the table of its extras, and the loss scale.

Of what ranks do not agree on, each has its own under its place in the grid (`rng_state/pp1.tp0`); of torch_dist
`object/KEY` is any other object.
"""

from __future__ import annotations

from ucp.contract.run_extras import ExtraRow, ExtraTable, LossScale
from ucp.core.index import Index
from ucp_formats.megatron.names import MODULES

SCHEDULER = "opt_param_scheduler"
"""Learning rate and weight decay."""
RANDOM = "rng_state"
"""RNG states of one rank of a grid, by its place: of use at the same layout alone."""

_REMADE = ExtraRow(is_carried=False)

EXTRAS: ExtraTable = {
    SCHEDULER: ExtraRow(),
    "num_floating_point_operations_so_far": ExtraRow(),
    "checkpoint_version": ExtraRow(),
    # arguments of the run, how the writer laid things out, which modules layers are built of
    "args": _REMADE,
    "client_state/args": _REMADE,
    "iteration": _REMADE,
    "content_metadata": _REMADE,
    MODULES: _REMADE,
    # what else optimizers say (gradient scaler, sharding type), of one or of the Nth of a chain
    "optimizer": _REMADE,
    "optimizer/": _REMADE,
    # `_extra_state` of a module that holds something
    "extra_state/": _REMADE,
    RANDOM: _REMADE,
    f"{RANDOM}/": _REMADE,
    # means nothing to another run, and Megatron does without
    "rerun_state_machine": _REMADE,
    "rerun_state_machine/": _REMADE,
    "rerun_state_machine_state": _REMADE,
    "rerun_state_machine_state/": _REMADE,
}


def megatron_scale(index: Index) -> LossScale | None:
    """The scale of the loss where it adapts itself, as DynamicGradScaler keeps it (core/optimizer/grad_scaler.py)."""
    state = scaler_of(index)
    if not isinstance(state, dict) or not {"scale", "growth_tracker"} <= state.keys():
        return None
    return LossScale(found_in="optimizer", scale=state["scale"], growth_tracker=state["growth_tracker"])


def scaler_of(index: Index) -> object:
    """State of the gradient scaler, which fp16 needs; None where the source has none."""
    for extra in index.extras:
        if extra.name.startswith("optimizer/") and "grad_scaler" in extra.name.split("/"):
            return extra.value
        if extra.name == "optimizer" and isinstance(extra.value, dict):
            for part in (extra.value, *(part for part in extra.value.values() if isinstance(part, dict))):
                if part.get("grad_scaler"):
                    return part["grad_scaler"]
    return None
