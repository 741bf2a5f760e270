"""The arguments that a written checkpoint carries: the source's own, with the layout's sizes put right.

Megatron takes the layout of a checkpoint from them, and compares some with its own when it loads (checkpointing.py:
check_checkpoint_args). What a source of another framework lacks is found in `derived`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ucp.core.pickle_values import GlobalName, Stub
from ucp.core.topology import Topology

__all__ = ["namespace", "relaid_arguments"]

_NAMESPACE = GlobalName("argparse", "Namespace")
_VIRTUAL = "virtual_pipeline_model_parallel_size"
_GROUP = "microbatch_group_size_per_vp_stage"
"""As many as stages, where a run does not say."""
_UNEVEN: Mapping[str, object] = {
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "pipeline_model_parallel_layout": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
"""Arguments that deal layers out unevenly over the stages of one pipeline; others have equal stages."""


def namespace(arguments: Mapping[str, object]) -> Stub:
    """The arguments as argparse keeps them."""
    return Stub(_NAMESPACE, state=dict(arguments), has_state=True)


def relaid_arguments(
    arguments: Mapping[str, object],
    own: Topology,
    *,
    ckpt_format: str,
    iteration: int,
    has_optimizer: bool,
    has_random: bool,
) -> dict[str, object]:
    """`arguments` for a run of layout `own`, whose checkpoint is saved as `ckpt_format`.

    `has_optimizer`, `has_random`: whether it holds optimizer and random states; Megatron asks for neither where the
    arguments say that they were not saved.
    """
    virtual = own.vpp if own.vpp > 1 else None
    layers = arguments.get("num_layers")
    changed: dict[str, object] = {
        "tensor_model_parallel_size": own.tp,
        "pipeline_model_parallel_size": own.pp,
        _VIRTUAL: virtual,
        "context_parallel_size": own.cp,
        "expert_model_parallel_size": own.ep,
        "expert_tensor_parallel_size": own.expert_tp,
        "world_size": own.tp * own.cp * own.dp * own.pp,
        "data_parallel_size": own.dp,
        "ckpt_format": ckpt_format,
        "iteration": iteration,
    }
    for name, has in (("no_save_optim", has_optimizer), ("no_save_rng", has_random)):
        if has == bool(arguments.get(name)):
            changed[name] = not has
    each = layers // (own.pp * own.vpp) if isinstance(layers, int) and virtual else None
    known: dict[str, object] = {
        "transformer_pipeline_model_parallel_size": own.pp,
        "num_virtual_stages_per_pipeline_rank": virtual,
        "num_layers_per_virtual_pipeline_stage": each,
        "use_dist_ckpt": ckpt_format == "torch_dist",
    }
    if arguments.get(_GROUP) == arguments.get("pipeline_model_parallel_size", own.pp):
        known[_GROUP] = own.pp
    if own.pp != arguments.get("pipeline_model_parallel_size", 1) or virtual != arguments.get(_VIRTUAL):
        known |= _UNEVEN
    changed |= {name: value for name, value in known.items() if name in arguments}
    if ckpt_format == "torch_dist":
        changed["dist_ckpt_optim_fully_reshardable"] = True
    return {**arguments, **changed}
