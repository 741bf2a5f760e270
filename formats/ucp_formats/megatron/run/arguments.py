"""The arguments of a run, which Megatron saves whole: an argparse.Namespace of some 600 values.

What later steps need stands in typed fields, None where the file does not say. All of it is kept in `raw`, which is
what the expressions of a model family are evaluated over.

>>> arguments = read_arguments(Stub(GlobalName("argparse", "Namespace"), state={"model_parallel_size": 2}), "a.pt")
>>> arguments.tp, arguments.pp, arguments.topology()
(2, None, Topology(dp=1, tp=2, pp=1, ep=1, cp=1, zero=None, vpp=1, etp=None))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from ucp.core.pickle_values import GlobalName, Stub
from ucp.core.topology import Topology
from ucp.errors import MalformedError, TopologyError, UnsupportedError, listed
from ucp.io.pickle.fields import described

__all__ = ["KNOWN", "Arguments", "read_arguments"]

_KEYS: Mapping[str, tuple[str, ...]] = {
    "tp": ("tensor_model_parallel_size", "model_parallel_size"),
    "pp": ("pipeline_model_parallel_size",),
    "vpp": ("virtual_pipeline_model_parallel_size",),
    "ep": ("expert_model_parallel_size",),
    "etp": ("expert_tensor_parallel_size",),
    "cp": ("context_parallel_size",),
    "dp": ("data_parallel_size",),
    "world": ("world_size",),
    "num_layers": ("num_layers", "encoder_num_layers"),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "query_groups": ("num_query_groups",),
    "head_dim": ("kv_channels",),
    "ffn": ("ffn_hidden_size",),
    "gated": ("swiglu", "gated_linear_unit"),
    "num_experts": ("num_experts", "num_moe_experts"),
    "grouped_queries": ("group_query_attention",),
    "distributed_optimizer": ("use_distributed_optimizer",),
    "overlap_grad_reduce": ("overlap_grad_reduce",),
    "bucket_size": ("ddp_bucket_size",),
    "num_buckets": ("ddp_num_buckets",),
    "pads_buckets": ("ddp_pad_buckets_for_high_nccl_busbw",),
    "fully_parallel_save": ("ckpt_fully_parallel_save",),
    "padded_vocab_size": ("padded_vocab_size",),
    "vocab_size": ("vocab_size",),
    "untied": ("untie_embeddings_and_output_weights",),
    "first_stage_layers": ("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage"),
    "last_stage_layers": ("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage"),
    "iteration": ("iteration",),
    "consumed_train_samples": ("consumed_train_samples",),
    "bf16": ("bf16",),
    "fp16": ("fp16",),
}
"""Field to the names it had over the years, newest first (megatron/training/arguments.py)."""
KNOWN = frozenset(key for keys in _KEYS.values() for key in keys) | {"transformer_impl", "moe_grouped_gemm"}
"""Names of all arguments that are read; the last two say how a target names what it writes."""
_FLAGS = {
    "gated",
    "grouped_queries",
    "distributed_optimizer",
    "overlap_grad_reduce",
    "pads_buckets",
    "fully_parallel_save",
    "untied",
    "bf16",
    "fp16",
}
_WEIGHT_SHARDS = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
"""Ranks that a tensor-parallel part of a weight is cut over once more."""
_NAMESPACES = {"Namespace", "SimpleNamespace"}
_SIZES = (
    "num_layers",
    "hidden",
    "heads",
    "query_groups",
    "head_dim",
    "ffn",
    "num_experts",
    "padded_vocab_size",
    "vocab_size",
    "first_stage_layers",
    "last_stage_layers",
)
_MOST_LAYERS = 999_999
"""Layers of a model, at most: names count no further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Arguments of a run; None where they do not say."""

    raw: Mapping[str, object]
    """All of them, by name."""
    tp: int | None = None
    """Tensor-parallel ranks."""
    pp: int | None = None
    """Pipeline stages."""
    vpp: int | None = None
    """Chunks of the model per pipeline stage."""
    ep: int | None = None
    """Expert-parallel ranks."""
    etp: int | None = None
    """Tensor-parallel ranks of an expert."""
    cp: int | None = None
    """Context-parallel ranks."""
    dp: int | None = None
    """Data-parallel ranks."""
    world: int | None = None
    """All ranks."""
    num_layers: int | None = None
    """Transformer layers (of the decoder)."""
    hidden: int | None = None
    """Elements of a hidden state."""
    heads: int | None = None
    """Attention heads."""
    query_groups: int | None = None
    """Groups of heads that share key and value."""
    head_dim: int | None = None
    """Elements of a head."""
    ffn: int | None = None
    """Elements between the two projections of an MLP."""
    gated: bool | None = None
    """Whether the first projection of an MLP is gate and up in one."""
    num_experts: int | None = None
    """Experts of a layer."""
    grouped_queries: bool | None = None
    """Whether there are fewer groups than heads."""
    distributed_optimizer: bool | None = None
    """Whether optimizer states are cut over the data-parallel ranks."""
    overlap_grad_reduce: bool | None = None
    """Whether gradients are reduced bucket by bucket; without it a buffer is one bucket."""
    bucket_size: int | None = None
    """Elements from which a bucket is closed."""
    num_buckets: int | None = None
    """Buckets asked for, instead of their size."""
    pads_buckets: bool | None = None
    """Whether the end of a bucket is padded to a multiple of 65536 elements."""
    fully_parallel_save: bool | None = None
    """Whether all data-parallel ranks took part in saving."""
    padded_vocab_size: int | None = None
    """Rows of the embedding, padding counted."""
    vocab_size: int | None = None
    """Rows of the embedding, padding not counted; seldom recorded."""
    untied: bool | None = None
    """Whether the output layer has a weight of its own."""
    first_stage_layers: int | None = None
    """Layers of the first pipeline stage, where it differs from the others."""
    last_stage_layers: int | None = None
    """Layers of the last pipeline stage, where it differs from the others."""
    iteration: int | None = None
    """Steps done."""
    consumed_train_samples: int | None = None
    """Samples seen."""
    bf16: bool | None = None
    """Whether the model computes in bfloat16."""
    fp16: bool | None = None
    """Whether the model computes in float16."""

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel ranks of an expert: those of the model where it is not said."""
        return self.etp or self.tp or 1

    @property
    def is_pipelined(self) -> bool:
        """Whether there is more than one pipeline stage."""
        return (self.pp or 1) > 1

    def topology(self) -> Topology:
        """Degrees of parallelism. Raises MalformedError when one is impossible."""
        tp, pp, cp = self.tp or 1, self.pp or 1, self.cp or 1
        dp = self.dp or max((self.world or 1) // (tp * pp * cp), 1)
        etp = self.etp if self.num_experts and self.etp != tp else None
        try:
            return Topology(dp=dp, tp=tp, pp=pp, ep=self.ep or 1, cp=cp, vpp=self.vpp or 1, etp=etp)
        except TopologyError as error:
            raise MalformedError(
                f"the arguments that the checkpoint records are of no run: {error}. They are damaged or were edited: "
                "use another copy"
            ) from error


def read_arguments(value: object, where: str) -> Arguments:
    """Arguments out of what a file has under `args`: a namespace, a dict, or None where they were not saved.

    Raises MalformedError; all sizes that no model has are named together. Raises UnsupportedError for a run whose
    weights are cut over more than tensor-parallel ranks.
    """
    raw = _raw(value, where)
    _refuse_weight_shards(raw, where)
    found: dict[str, int | bool | None] = {}
    for field in fields(Arguments):
        for key in _KEYS.get(field.name, ()):
            if raw.get(key) is not None:
                found[field.name] = _typed(raw[key], field.name, f"{key} in the arguments of {where}")
                break
    _check_sizes(raw, found, where)
    return Arguments(raw=raw, **found)  # type: ignore[arg-type]  # _typed gives bool for flags and int for the rest


def _refuse_weight_shards(raw: Mapping[str, object], where: str) -> None:
    """Raise UnsupportedError for generalized tensor parallelism (megatron-core 0.20, `gtp_weight_remat_size`)."""
    cut = {name: own for name in _WEIGHT_SHARDS if isinstance(own := raw.get(name), int) and own > 1}
    if cut:
        shown = ", ".join(f"{name}={own}" for name, own in cut.items())
        raise UnsupportedError(
            f"{where} is of a run with Generalized Tensor Parallelism ({shown}), which is not read: its weights are "
            "cut over these ranks too, with rows of padding in every cut, and files of ranks do not hold them all. "
            "Load it with Megatron in a run without (--tensor-parallel-num-weight-shards as many as tensor-parallel "
            "ranks, --expert-tensor-parallel-num-weight-shards as many as those of experts), save it with "
            "--ckpt-format torch_dist, and convert that"
        )


def _check_sizes(raw: Mapping[str, object], found: Mapping[str, int | bool | None], where: str) -> None:
    layers = found.get("num_layers") or 0
    wrong = [name for name in _SIZES if (found.get(name) or 0) < 0 or (name == "num_layers" and layers > _MOST_LAYERS)]
    if wrong:
        keys = (next(key for key in _KEYS[name] if raw.get(key) is not None) for name in wrong)
        shown = listed(f"{key}: {raw[key]}" for key in keys)
        raise MalformedError(
            f"expected sizes of a model in the arguments of {where}; got\n{shown}\n"
            "They are damaged or were edited: use another copy"
        )


def _raw(value: object, where: str) -> dict[str, object]:
    match value:
        case None:
            return {}
        case Stub(made_by=GlobalName(qualname=qualname)) if qualname in _NAMESPACES:
            state = value.state if value.has_state or value.state is not None else {}
            value = state if isinstance(state, dict) else value
    if not isinstance(value, dict):
        raise MalformedError(f"expected a namespace for the arguments of {where}; got {described(value)}")
    return {key: own for key, own in value.items() if isinstance(key, str)}


def _typed(value: object, name: str, where: str) -> int | bool:
    if name in _FLAGS:
        if not isinstance(value, bool | int):
            raise MalformedError(f"expected true or false for {where}; got {described(value)}")
        return bool(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise MalformedError(f"expected a whole number for {where}; got {described(value)}")
    return value
