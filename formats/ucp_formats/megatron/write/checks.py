"""What a run of Megatron cannot be: settings that the tensors contradict, layouts that do not divide the model.

`--set NAME=VALUE` gives arguments of Megatron. A wrong argument is worse than none: Megatron takes the model from them
(`--use-checkpoint-args`), and so does `ucp`. So one that the tensors or the topology contradict is no choice either.

A layout that Megatron would not start at is refused, with every reason. The rules are megatron-core's own (0.13 to
0.19): TransformerConfig.__post_init__ for heads, groups and layers, MoELayer for experts, MambaMixer for its heads and
groups, and `divide` in column- and row-parallel layers for everything else. The vocabulary is apart: `torch_dist` is
loaded at any number of padded rows (`allow_shape_mismatch`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ucp.core.index import Kind
from ucp.core.layout import place
from ucp.core.tensor import DType
from ucp.core.topology import Topology
from ucp.errors import MalformedError, TopologyError, UsageError, listed
from ucp.io.pickle.fields import shown
from ucp_formats.megatron.arguments import READ_ARGUMENTS, compare_sizes, read_arguments
from ucp_formats.megatron.mesh import hybrid_pattern, stage_problem
from ucp_formats.megatron.names import EMBEDDING, OUTPUT
from ucp_formats.megatron.write.arguments import LETTERS, layer_letters
from ucp_formats.megatron.write.model import TargetModel, TargetRun, TargetTensor, find_grid_problem

_NAMES = {
    "sizes of the model": (
        "num_layers hidden_size ffn_hidden_size vocab_size padded_vocab_size make_vocab_size_divisible_by seq_length "
        "max_position_embeddings untie_embeddings_and_output_weights"
    ),
    "attention": (
        "num_attention_heads num_query_groups group_query_attention kv_channels qk_layernorm attention_dropout "
        "apply_query_key_layer_scaling multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim "
        "v_head_dim"
    ),
    "positions": (
        "position_embedding_type add_position_embedding use_rotary_position_embeddings rotary_base rotary_percent "
        "rotary_interleaved rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor"
    ),
    "layers": (
        "normalization norm_epsilon apply_layernorm_1p add_bias_linear add_qkv_bias swiglu gated_linear_unit "
        "quick_geglu squared_relu hidden_dropout transformer_impl spec linear_attention_freq"
    ),
    "experts": (
        "num_experts num_moe_experts moe_layer_freq moe_ffn_hidden_size moe_latent_size moe_grouped_gemm "
        "moe_shared_expert_intermediate_size moe_router_topk moe_router_topk_scaling_factor moe_router_pre_softmax "
        "moe_router_score_function moe_router_enable_expert_bias moe_router_load_balancing_type moe_aux_loss_coeff "
        "moe_token_dispatcher_type"
    ),
    "hybrid models and multi-token prediction": (
        "is_hybrid_model hybrid_layer_pattern hybrid_override_pattern mamba_state_dim mamba_head_dim mamba_num_groups "
        "mamba_num_heads mtp_num_layers mtp_hybrid_override_pattern mtp_use_repeated_layer"
    ),
    "tokenizer": "tokenizer_type tokenizer_model tiktoken_pattern",
    "precision and optimizer": (
        "bf16 fp16 params_dtype optimizer use_distributed_optimizer accumulate_allreduce_grads_in_fp32 "
        "no_weight_decay_cond_type apply_wd_to_qk_layernorm embedding_init_method_std use_mup mup_base_hidden_size "
        "weight_decay lr min_lr decoupled_lr decoupled_min_lr lr_decay_style lr_decay_steps lr_warmup_steps "
        "override_opt_param_scheduler use_checkpoint_opt_param_scheduler"
    ),
    "gradient buckets": "overlap_grad_reduce ddp_bucket_size ddp_num_buckets ddp_pad_buckets_for_high_nccl_busbw",
    "layers over pipeline stages": (
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split pipeline_model_parallel_layout "
        "use_tp_pp_dp_mapping"
    ),
    "training data seen": "consumed_train_samples",
}
"""What Megatron takes from a checkpoint (training/checkpointing.py: load_args_from_checkpoint) and what ucp reads."""
SETTINGS = {name: about for about, names in _NAMES.items() for name in names.split()}
SETTINGS |= dict.fromkeys(sorted(READ_ARGUMENTS - SETTINGS.keys()), "layout and progress of the run")
"""Setting to what it is about."""
_UNTIED = "untie_embeddings_and_output_weights"
_HALVES = {DType.BFLOAT16: "bf16", DType.FLOAT16: "fp16"}
"""Types that a model computes in, by the argument that says so."""


def check_settings(asked: Mapping[str, object], recorded: Mapping[str, object]) -> None:
    """Raise UsageError naming all settings whose value is impossible, or of another kind than what was recorded.

    `recorded`: arguments of the source; empty where it has none.
    """
    numbers = {name: own for name, own in asked.items() if name in READ_ARGUMENTS and isinstance(own, int)}
    wrong = [
        *(f"{name}: {number} is below 0" for name, number in numbers.items() if number < 0),
        *(f"{name}: {text}" for name, value in asked.items() if (text := _other_kind(value, recorded.get(name)))),
    ]
    if wrong:
        raise UsageError(f"expected arguments of Megatron with --set; got\n{listed(wrong)}")
    try:
        read_arguments(dict(asked), "--set")
    except MalformedError as error:
        raise UsageError(str(error)) from error


def _other_kind(value: object, recorded: object) -> str:
    """What is wrong with a value beside the one that was recorded; empty when nothing is."""
    if value is None or not isinstance(recorded, bool | int | float | str | list | tuple):
        return ""
    alike = {float: (int, float), tuple: (list,)}.get(type(recorded), (type(recorded),))
    return "" if type(value) in alike else f"{value!r}, and the source has {shown(recorded)}"


def check_asked(
    asked: Mapping[str, object], model: TargetModel, *, before: Mapping[str, object], written: Mapping[str, object]
) -> None:
    """Raise UsageError naming every value in `asked` that what is written contradicts.

    `before`: the arguments without what was asked for. `written`: those that the checkpoint will carry.
    """
    if not asked:
        return
    lines = [
        f"{name} = {value!r}: it is {written[name]!r} by --topology, --layout and what is written"
        for name, value in asked.items()
        if name in written and written[name] != value
    ]
    counts = {"num_layers": (model.layers, "layers"), "num_experts": (model.experts, "experts in a layer")}
    lines += [
        f"{name} = {asked[name]!r}: there are {count} {what}"
        for name, (count, what) in counts.items()
        if name in asked and (asked[name] or 0) != count
    ]
    is_untied = any(own.name == OUTPUT for own in model.tensors)
    if _UNTIED in asked and bool(asked[_UNTIED]) != is_untied:
        lines.append(f"{_UNTIED} = {asked[_UNTIED]!r}: there is {'an' if is_untied else 'no'} {OUTPUT}")
    lines += [*_hybrid_problems(asked, model), *_types(asked, model)]
    shapes = model.shapes
    known = compare_sizes(model.family, before, shapes, pads_on_load=True)
    lines += [own for own in compare_sizes(model.family, written, shapes, pads_on_load=True) if own not in known]
    if lines:
        raise UsageError(
            f"expected --set to say what holds for the checkpoint that is written; got\n{listed(lines)}\n"
            "Drop these, or convert a checkpoint of the model that you mean"
        )


def _hybrid_problems(asked: Mapping[str, object], model: TargetModel) -> Iterator[str]:
    """The pattern of a hybrid model, against what its layers hold."""
    pattern, letters = hybrid_pattern(asked), layer_letters(own.name for own in model.tensors)
    if pattern is None:
        return
    if any(len(own) > 1 for own in letters):
        yield (
            f"hybrid pattern {pattern!r}: the layers hold attention and a feed-forward each, as those of a GPT. A "
            "hybrid run of megatron-core 0.20 loads the checkpoint of a GPT by itself: write it as one"
        )
        return
    said = pattern.replace("|", "")
    if len(said) != len(letters) or any(a != b for a, b in zip(said, letters, strict=True) if a in LETTERS.values()):
        yield f"hybrid pattern {pattern!r}: by their tensors the layers are {''.join(letters)!r}"


def _types(asked: Mapping[str, object], model: TargetModel) -> Iterator[str]:
    """Types other than those that the model's tensors have; a model in float32 may compute in any."""
    there = {own.dtype for own in model.tensors if own.kind is not Kind.BUFFER and own.dtype in _HALVES}
    for dtype, name in _HALVES.items() if there else ():
        if name in asked and bool(asked[name]) != (dtype in there):
            held = " and ".join(sorted(own.value for own in there))
            yield f"{name} = {asked[name]!r}: the model's weights are {held} (--dtype weight=... casts them)"


_MAMBA = ".mixer.A_log"
_MOST_KINDS = 4
"""Kinds of tensors that are named in one line."""


def check_division(run: TargetRun) -> None:
    """Prove that a run of this layout can hold the model. Raises TopologyError with all that speaks against it."""
    mesh, arguments, model = run.topology, run.arguments, run.model
    problems = [
        find_grid_problem(mesh),
        *_head_problems(mesh.tp, arguments, model),
        *_cut_problems(model, mesh),
        *_vocabulary_problems(run),
        f"experts: ep={mesh.ep}, and the model has none" if mesh.ep > 1 and not model.experts else None,
        f"experts: ep={mesh.ep} does not divide {model.experts}" if model.experts % mesh.ep else None,
        stage_problem(model.layers, pp=mesh.pp, vpp=mesh.vpp, arguments=arguments),
    ]
    lines = [own for own in problems if own]
    if lines:
        raise TopologyError(
            f"expected a layout that divides the model into equal parts, as Megatron does; got {mesh} for "
            f"{run.index.path}:\n{listed(lines, most=40)}\nChoose other degrees"
        )


def _head_problems(tp: int, arguments: Mapping[str, object], model: TargetModel) -> Iterator[str]:
    """Heads, and groups of heads that share keys and values: as many as heads, unless grouped."""
    heads = _number(arguments, "num_attention_heads")
    grouped = arguments.get("group_query_attention", True)
    groups = (_number(arguments, "num_query_groups") if grouped else 0) or heads
    if heads % tp:
        yield f"heads: tp={tp} does not divide num_attention_heads={heads}"
    if groups and groups != heads and groups % tp and tp % groups:
        yield f"groups of queries: num_query_groups={groups} is neither a multiple nor a divisor of tp={tp}"
    mamba = next((own.shape[0] for own in model.tensors if own.name.endswith(_MAMBA)), 0)
    shared = _number(arguments, "mamba_num_groups")
    if mamba % tp:
        yield f"heads of Mamba: tp={tp} does not divide {mamba}"
    if mamba and shared % tp:
        yield f"groups of Mamba: tp={tp} does not divide mamba_num_groups={shared}"


def _number(arguments: Mapping[str, object], name: str) -> int:
    """A whole number; 0 where the arguments have none."""
    value = arguments.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _cut_problems(model: TargetModel, mesh: Topology) -> Iterator[str]:
    """Dims that are cut into parts of other lengths: a line per axis, every kind of tensor once."""
    degrees = {"tp": mesh.tp, "etp": mesh.expert_tp}
    uneven: dict[str, dict[str, None]] = {}
    kinds: dict[tuple[str, tuple[int, ...]], TargetTensor] = {}
    for tensor in model.tensors:
        kinds.setdefault((tensor.match.rule.name.text, tensor.shape), tensor)
    for (name, shape), tensor in kinds.items():
        if tensor.match.rule.padded is not None:
            continue
        layout = tensor.match.layout(axes=degrees, global_shape=shape)
        first = {axis.axis: 0 for axis in layout.axes}
        wanted = [piece.box.sizes for piece in place(layout, shape, coords=first)]
        for axis in layout.axes:
            last = {**first, axis.axis: axis.parts - 1}
            if [piece.box.sizes for piece in place(layout, shape, coords=last)] != wanted:
                uneven.setdefault(axis.axis, {})[f"{name} {list(shape)}"] = None
    for axis_name, names in uneven.items():
        shown = ", ".join(list(names)[:_MOST_KINDS])
        more = f" and {len(names) - _MOST_KINDS} more like it" if len(names) > _MOST_KINDS else ""
        yield f"dims: {axis_name}={degrees[axis_name]} does not divide {shown}{more}"


def _rows(run: TargetRun) -> tuple[int, int]:
    """Rows of the embedding, padding counted, in the files (0 without one) and in the run."""
    rows = next((own.shape[0] for own in run.model.tensors if own.name == EMBEDDING), 0)
    return rows, _number(run.arguments, "padded_vocab_size") or rows


def _vocabulary_problems(run: TargetRun) -> Iterator[str]:
    tp, (rows, padded) = run.topology.tp, _rows(run)
    elsewhere = "torch_dist (--layout torch_dist) can be loaded with other padding"
    if rows and padded != rows and run.is_legacy:
        yield f"vocabulary: padded_vocab_size={padded}, and there are {rows} rows; {elsewhere}"
    elif padded % tp:
        multiple = max(_number(run.arguments, "make_vocab_size_divisible_by"), 1) * tp
        next_one = -(-padded // multiple) * multiple
        given = f"say what the run pads to, as in --set padded_vocab_size={next_one}"
        remedy = elsewhere if run.is_legacy else given
        yield f"vocabulary: tp={tp} does not divide padded_vocab_size={padded}; {remedy}"


def vocabulary_notes(run: TargetRun) -> Iterator[str]:
    """What a run makes of the rows of the vocabulary, without a word."""
    tp, (rows, padded) = run.topology.tp, _rows(run)
    if not rows:
        return
    if padded != rows:
        what = (
            f"fills rows {rows} to {padded - 1} with zeros" if padded > rows else f"drops rows {padded} to {rows - 1}"
        )
        yield f"the vocabulary has {rows} rows here and {padded} in the run: Megatron {what}, in every state"
        return
    multiple = _number(run.arguments, "make_vocab_size_divisible_by") * tp
    if multiple and rows % multiple:
        otherwise = "Megatron does not load it" if run.is_legacy else "it adds rows of zeros, or drops the last"
        yield (
            f"the vocabulary is padded to {rows} rows, a run of tp={tp} pads to a multiple of {multiple}: start it "
            f"with --make-vocab-size-divisible-by {rows // tp}, or {otherwise}"
        )
