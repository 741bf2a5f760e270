"""The arguments of a run, which Megatron saves: an argparse.Namespace of some 600 values.

The arguments that later steps need are typed fields, None if they were not saved. `raw` has all arguments; a model
family computes its sizes from it.

>>> arguments = read_arguments(Stub(GlobalName("argparse", "Namespace"), state={"model_parallel_size": 2}), "a.pt")
>>> arguments.tp, arguments.pp, arguments.topology()
(2, None, Topology(dp=1, tp=2, pp=1, ep=1, cp=1, zero=None, vpp=1, etp=None, dp_replicate=None, dp_shard=None))

A family computes its sizes both from arguments and from shapes of tensors. If the two differ, the arguments were edited
or belong to another run, or the rules joined the wrong rows. The formulas are in the family's rules file ([sizes]), so
this check covers the rules of a user, too.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass

from ucp.core.gaps import find_lacking_states
from ucp.core.index import STEP, WEIGHT
from ucp.core.topology import Topology
from ucp.errors import MalformedError, TopologyError, UnsupportedError, format_count, format_list
from ucp.families.family import Family
from ucp.families.library import find_contradictions
from ucp.io.pickle.fields import describe_value
from ucp.io.pickle.values import GlobalName, Stub

_NAMES: Mapping[str, tuple[str, ...]] = {
    "tp": ("tensor_model_parallel_size", "model_parallel_size"),
    "pp": ("pipeline_model_parallel_size",),
    "vpp": ("virtual_pipeline_model_parallel_size",),
    "ep": ("expert_model_parallel_size",),
    "etp": ("expert_tensor_parallel_size",),
    "cp": ("context_parallel_size",),
    "dp": ("data_parallel_size",),
    "world": ("world_size",),
    "num_layers": ("num_layers", "encoder_num_layers"),
    "num_experts": ("num_experts", "num_moe_experts"),
    "pads_buckets": ("ddp_pad_buckets_for_high_nccl_busbw",),
    "has_output_weight": ("untie_embeddings_and_output_weights",),
    "iteration": ("iteration",),
}
"""Field of `Arguments` to the names of its argument over the years, newest first (megatron/training/arguments.py)."""
_FLAGS = frozenset[str]().union(
    ("swiglu", "gated_linear_unit", "group_query_attention", "use_distributed_optimizer", "overlap_grad_reduce"),
    ("ckpt_fully_parallel_save", "bf16", "fp16"),
    _NAMES["pads_buckets"],
    _NAMES["has_output_weight"],
)
"""Arguments that are true or false."""
_SIZES = frozenset[str]().union(
    ("hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size"),
    ("padded_vocab_size", "vocab_size"),
    ("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage"),
    ("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage"),
    _NAMES["num_layers"],
    _NAMES["num_experts"],
)
"""Sizes of the model, which are never below 0."""
_COUNTS = frozenset({"ddp_bucket_size", "ddp_num_buckets", "consumed_train_samples"})
_CHECKED = (_COUNTS | _SIZES | _FLAGS).union(*_NAMES.values())
READ_ARGUMENTS = _CHECKED | {"transformer_impl", "moe_grouped_gemm"}
"""Names of all arguments that ucp reads; the last two determine the keys that a target writes."""
_WEIGHT_SHARDS = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
"""Degrees of Generalized Tensor Parallelism, which shards each tensor-parallel shard of a weight again."""
_MOST_LAYERS = 999_999
"""Upper bound of the number of layers: names with more digits are not parsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Arguments of a run; None if they were not saved."""

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
    """Ranks in total."""
    num_layers: int | None = None
    """Transformer layers (of the decoder)."""
    num_experts: int | None = None
    """Experts of a layer."""
    pads_buckets: bool | None = None
    """Whether the end of a bucket is padded to a multiple of 65536 elements."""
    has_output_weight: bool | None = None
    """Whether the output layer has its own weight."""
    iteration: int | None = None
    """Training steps."""

    def topology(self) -> Topology:
        """Degrees of parallelism. Raises MalformedError when one is impossible."""
        tp, pp, cp = self.tp or 1, self.pp or 1, self.cp or 1
        dp = self.dp or max((self.world or 1) // (tp * pp * cp), 1)
        etp = self.etp if self.num_experts and self.etp != tp else None
        try:
            return Topology(dp=dp, tp=tp, pp=pp, ep=self.ep or 1, cp=cp, vpp=self.vpp or 1, etp=etp)
        except TopologyError as error:
            raise MalformedError(
                f"the arguments that the checkpoint records are impossible: {error}. They are damaged or were edited: "
                "use another copy"
            ) from error


def read_arguments(value: object, where: str) -> Arguments:
    """Arguments from the entry `args` of a file: a namespace, a dict, or None if they were not saved.

    Raises MalformedError, which names all impossible sizes together. Raises UnsupportedError for a run with Generalized
    Tensor Parallelism.
    """
    match value:
        case None:
            value = {}
        case Stub(made_by=GlobalName(qualname="Namespace" | "SimpleNamespace"), state=dict(state)):
            value = state
        case Stub(made_by=GlobalName(qualname="Namespace" | "SimpleNamespace"), state=None, has_state=False):
            value = {}
    if not isinstance(value, dict):
        raise MalformedError(f"expected a namespace for the arguments of {where}; got {describe_value(value)}")
    raw = {name: argument for name, argument in value.items() if isinstance(name, str)}
    shards = [f"{name}={ranks}" for name in _WEIGHT_SHARDS if isinstance(ranks := raw.get(name), int) and ranks > 1]
    if shards:  # megatron-core 0.20
        raise UnsupportedError(
            f"{where} was saved with Generalized Tensor Parallelism ({', '.join(shards)}), which ucp does not read: it "
            "shards weights over further ranks and pads every shard, and legacy files do not contain all shards. Load "
            "the checkpoint in a Megatron run without it (--tensor-parallel-num-weight-shards equal to the "
            "tensor-parallel size, --expert-tensor-parallel-num-weight-shards equal to the expert tensor-parallel "
            "size), save it with --ckpt-format torch_dist, and convert the result"
        )
    wrong = []
    for name in sorted(_CHECKED & {name for name, argument in raw.items() if argument is not None}):
        number, is_flag = raw[name], name in _FLAGS
        if not isinstance(number, int) or (isinstance(number, bool) and not is_flag):
            kind = "true or false" if is_flag else "a whole number"
            raise MalformedError(
                f"expected {kind} for {name} in the arguments of {where}; got {describe_value(number)}"
            )
        if (name in _SIZES and number < 0) or (name in _NAMES["num_layers"] and number > _MOST_LAYERS):
            wrong.append(f"{name}: {number}")
    if wrong:
        raise MalformedError(
            f"expected sizes of a model in the arguments of {where}; got\n{format_list(wrong)}\n"
            "The arguments are damaged or were edited: use another copy"
        )
    typed: dict[str, int | bool | None] = {}
    for field, names in _NAMES.items():
        argument = next((raw[name] for name in names if raw.get(name) is not None), None)
        typed[field] = bool(argument) if names[0] in _FLAGS and argument is not None else argument
    return Arguments(raw=raw, **typed)  # type: ignore[arg-type]  # bool for flags and int for the rest


_HETEROGENEOUS = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")
"""Arguments of a model whose layers differ in size; no other argument records these sizes."""
_PADDING = "padded_vocab_size"
"""Rows of the padded embedding. Loading torch_dist adds or drops padding, so files may have another number of rows."""


def compare_sizes(
    family: Family, arguments: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]], *, pads_on_load: bool
) -> tuple[str, ...]:
    """Sizes for which arguments and global tensors give different values, a line each.

    `shapes`: canonical name to global shape. `pads_on_load`: whether loading adds or drops padding of the vocabulary,
    so that its padded size is not compared.
    """
    if any(arguments.get(name) for name in _HETEROGENEOUS):
        return ()
    known = {name: argument for name, argument in arguments.items() if not pads_on_load or name != _PADDING}
    return find_contradictions(family, arguments=known, shapes=shapes)


def check_recorded(
    family: Family,
    arguments: Mapping[str, object],
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
    *,
    pads_on_load: bool,
) -> None:
    """Raise MalformedError naming every recorded size that differs from that of the global tensors.

    `where`: the checkpoint, for the message; the rest as for `compare_sizes`.
    """
    lines = compare_sizes(family, arguments, shapes, pads_on_load=pads_on_load)
    if lines:
        raise MalformedError(
            f"expected the tensors of {where} to have the sizes that its arguments record; joined by the rules "
            f"of the family {family.name!r}, they have other sizes:\n{format_list(lines)}\n"
            "Either the arguments were edited or belong to another run: use another copy. Or your own rules "
            "(--patterns) join the wrong rows: correct them. If the tensors are right and the arguments wrong, give "
            "the size under [given] in a rules file"
        )


def check_gaps(
    states: Mapping[str, frozenset[str]],
    optimizers: Mapping[str, Hashable],
    where: str,
    *,
    without_master: Collection[str] = (),
) -> None:
    """Raise MalformedError naming every parameter that lacks optimizer states, and the missing states.

    `states`: parameter to its states with a value per element. `optimizers`: parameter to its optimizer, if the run has
    several and it is known. `without_master`: parameters that need no master.
    """
    lacking: dict[str, list[str]] = {}
    for name, missing in find_lacking_states(
        {name: names - {STEP} for name, names in states.items()}, optimizers
    ).items():
        for state in missing:
            if state != WEIGHT or name not in without_master:
                lacking.setdefault(name, []).append("master" if state == WEIGHT else state)
    if lacking:
        lines = (f"{name}: {', '.join(missing)}" for name, missing in lacking.items())
        raise MalformedError(
            f"expected all trained parameters to have the same optimizer states; in {where} "
            f"{format_count(len(lacking), 'parameter lacks', 'parameters lack')} some:\n{format_list(lines)}\n"
            "Part of the optimizer is lost: copy the checkpoint again, or use another one"
        )
