"""The arguments of a run, which Megatron saves whole: an argparse.Namespace of some 600 values.

What later steps need stands in typed fields, None where the file does not say. All of it is kept in `raw`, which is
what the expressions of a model family are evaluated over.

>>> arguments = read_arguments(Stub(GlobalName("argparse", "Namespace"), state={"model_parallel_size": 2}), "a.pt")
>>> arguments.tp, arguments.pp, arguments.topology()
(2, None, Topology(dp=1, tp=2, pp=1, ep=1, cp=1, zero=None, vpp=1, etp=None, dp_replicate=None, dp_shard=None))

What a family's sizes are found from, arguments and shapes of tensors, must give one value: where they differ, the
arguments were edited, are of another run, or the rules joined the wrong rows. Which sizes these are is data of the
family (its [sizes]), so rules of the user's own are held against what the run recorded, too.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, fields

from ucp.core.gaps import find_lacking_states
from ucp.core.index import STEP, WEIGHT
from ucp.core.topology import Topology
from ucp.errors import MalformedError, TopologyError, UnsupportedError, counted, listed
from ucp.families.family import Family
from ucp.families.library import find_contradictions
from ucp.io.pickle.fields import described
from ucp.io.pickle.values import GlobalName, Stub

_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "tp": ("tensor_model_parallel_size", "model_parallel_size"),
    "pp": ("pipeline_model_parallel_size",),
    "vpp": ("virtual_pipeline_model_parallel_size",),
    "ep": ("expert_model_parallel_size",),
    "etp": ("expert_tensor_parallel_size",),
    "cp": ("context_parallel_size",),
    "dp": ("data_parallel_size",),
    "world": ("world_size",),
    "bucket_size": ("ddp_bucket_size",),
    "num_buckets": ("ddp_num_buckets",),
    "iteration": ("iteration",),
    "consumed_train_samples": ("consumed_train_samples",),
}
"""What is a number to the names it had over the years, newest first (megatron/training/arguments.py)."""
_SIZES: Mapping[str, tuple[str, ...]] = {
    "num_layers": ("num_layers", "encoder_num_layers"),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "query_groups": ("num_query_groups",),
    "head_dim": ("kv_channels",),
    "ffn": ("ffn_hidden_size",),
    "num_experts": ("num_experts", "num_moe_experts"),
    "padded_vocab_size": ("padded_vocab_size",),
    "vocab_size": ("vocab_size",),
    "first_stage_layers": ("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage"),
    "last_stage_layers": ("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage"),
}
"""The same of sizes of the model, which are never below 0."""
_FLAGS: Mapping[str, tuple[str, ...]] = {
    "gated": ("swiglu", "gated_linear_unit"),
    "grouped_queries": ("group_query_attention",),
    "distributed_optimizer": ("use_distributed_optimizer",),
    "overlap_grad_reduce": ("overlap_grad_reduce",),
    "pads_buckets": ("ddp_pad_buckets_for_high_nccl_busbw",),
    "fully_parallel_save": ("ckpt_fully_parallel_save",),
    "untied": ("untie_embeddings_and_output_weights",),
    "bf16": ("bf16",),
    "fp16": ("fp16",),
}
"""The same of what is true or false."""
_KEYS = {**_NUMBERS, **_SIZES, **_FLAGS}
READ_ARGUMENTS = frozenset(key for keys in _KEYS.values() for key in keys) | {"transformer_impl", "moe_grouped_gemm"}
"""Names of all arguments that are read; the last two say how a target names what it writes."""
_WEIGHT_SHARDS = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
"""Ranks that a tensor-parallel part of a weight is cut over once more."""
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
    heads: int | None = None
    """Attention heads."""
    num_experts: int | None = None
    """Experts of a layer."""
    pads_buckets: bool | None = None
    """Whether the end of a bucket is padded to a multiple of 65536 elements."""
    untied: bool | None = None
    """Whether the output layer has a weight of its own."""
    iteration: int | None = None
    """Steps done."""

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
    match value:
        case None:
            value = {}
        case Stub(made_by=GlobalName(qualname="Namespace" | "SimpleNamespace"), state=dict(state)):
            value = state
        case Stub(made_by=GlobalName(qualname="Namespace" | "SimpleNamespace"), state=None, has_state=False):
            value = {}
    if not isinstance(value, dict):
        raise MalformedError(f"expected a namespace for the arguments of {where}; got {described(value)}")
    raw = {key: own for key, own in value.items() if isinstance(key, str)}
    shards = [f"{name}={own}" for name in _WEIGHT_SHARDS if isinstance(own := raw.get(name), int) and own > 1]
    if shards:  # megatron-core 0.20
        raise UnsupportedError(
            f"{where} is of a run with Generalized Tensor Parallelism ({', '.join(shards)}), which is not read: its "
            "weights are cut over these ranks too, with rows of padding in every cut, and files of ranks do not hold "
            "them all. Load it with Megatron in a run without (--tensor-parallel-num-weight-shards as many as "
            "tensor-parallel ranks, --expert-tensor-parallel-num-weight-shards as many as those of experts), save it "
            "with --ckpt-format torch_dist, and convert that"
        )
    typed: dict[str, int | bool] = {}
    wrong = []
    for name, keys in _KEYS.items():
        key = next((key for key in keys if raw.get(key) is not None), None)
        if key is not None:
            number, is_flag = raw[key], name in _FLAGS
            if not isinstance(number, int) or (isinstance(number, bool) and not is_flag):
                wanted = "true or false" if is_flag else "a whole number"
                raise MalformedError(
                    f"expected {wanted} for {key} in the arguments of {where}; got {described(number)}"
                )
            typed[name] = bool(number) if is_flag else number
            is_too_many = name == "num_layers" and typed[name] > _MOST_LAYERS
            if is_too_many or (name in _SIZES and typed[name] < 0):
                wrong.append(f"{key}: {raw[key]}")
    if wrong:
        raise MalformedError(
            f"expected sizes of a model in the arguments of {where}; got\n{listed(wrong)}\n"
            "They are damaged or were edited: use another copy"
        )
    fitting = {field.name: typed[field.name] for field in fields(Arguments) if field.name in typed}
    return Arguments(raw=raw, **fitting)  # type: ignore[arg-type]  # bool for flags and int for the rest


_HETEROGENEOUS = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")
"""Arguments of a model whose layers each have sizes of their own, which no other argument tells."""
_PADDING = "padded_vocab_size"
"""Rows that a run pads its embedding to; torch_dist adds and drops padding at loading, so files may have others."""


def compare_sizes(
    family: Family, arguments: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]], *, pads_on_load: bool
) -> tuple[str, ...]:
    """What arguments and whole tensors say differently, a line each.

    `shapes`: canonical name to global shape. `pads_on_load`: whether the run may pad the vocabulary otherwise.
    """
    if any(arguments.get(key) for key in _HETEROGENEOUS):
        return ()
    said = {key: own for key, own in arguments.items() if not pads_on_load or key != _PADDING}
    return find_contradictions(family, arguments=said, shapes=shapes)


def check_recorded(
    family: Family,
    arguments: Mapping[str, object],
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
    *,
    pads_on_load: bool,
) -> None:
    """Raise MalformedError naming every recorded size that is not that of the tensors put together.

    `where`: the checkpoint, for the message; the rest as for `sizes_in_doubt`.
    """
    lines = compare_sizes(family, arguments, shapes, pads_on_load=pads_on_load)
    if lines:
        raise MalformedError(
            f"expected the tensors of {where} to have the sizes that its arguments record; put together by the rules "
            f"of the family {family.name!r} they have not:\n{listed(lines)}\n"
            "The arguments were edited or are of another run: use another copy; or rules of your own (--patterns) "
            "join the wrong rows: mend them. Where the arguments are wrong and the tensors right, say the size under "
            "[given] in a rules file"
        )


def check_gaps(
    states: Mapping[str, frozenset[str]],
    optimizers: Mapping[str, Hashable],
    where: str,
    *,
    without_master: Collection[str] = (),
) -> None:
    """Raise MalformedError naming every parameter that lacks states, with these.

    `states`: parameter to its states with a value per element. `optimizers`: which of several it belongs to,
    where that is known. `without_master`: parameters that need none.
    """
    lacking: dict[str, list[str]] = {}
    for name, own in find_lacking_states({name: own - {STEP} for name, own in states.items()}, optimizers).items():
        for state in own:
            if state != WEIGHT or name not in without_master:
                lacking.setdefault(name, []).append("master" if state == WEIGHT else state)
    if lacking:
        lines = (f"{name}: {', '.join(own)}" for name, own in lacking.items())
        raise MalformedError(
            f"expected of every trained parameter the states that others have; in {where} "
            f"{counted(len(lacking), 'parameter lacks', 'parameters lack')} some:\n{listed(lines)}\n"
            "Part of the optimizer is lost: copy the checkpoint again, or use another one"
        )
