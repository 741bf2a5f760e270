"""Checks of settings against the tensors, and of a topology against the model.

`--set NAME=VALUE` sets arguments of Megatron. Megatron builds the model from them (`--use-checkpoint-args`), as `ucp`
does, so settings must not contradict the tensors or the topology.

A topology that Megatron would not start with is refused, by the rules of megatron-core 0.13 to 0.19:
TransformerConfig.__post_init__ for heads, groups and layers, MoELayer for experts, MambaMixer for its heads and groups,
and `divide` in column- and row-parallel layers for the rest. The vocabulary is an exception: `torch_dist` can be loaded
with any number of padded rows (`allow_shape_mismatch`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ucp.core.index import Kind
from ucp.core.layout import place
from ucp.core.tensor import DType
from ucp.core.topology import Topology
from ucp.errors import MalformedError, TopologyError, UsageError, format_list
from ucp.io.pickle.fields import format_value
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
"""Arguments that Megatron reads from a checkpoint (checkpointing.py: load_args_from_checkpoint), or that ucp reads."""
SETTINGS = {name: about for about, names in _NAMES.items() for name in names.split()}
SETTINGS |= dict.fromkeys(sorted(READ_ARGUMENTS - SETTINGS.keys()), "layout and progress of the run")
"""Setting to its topic."""
_UNTIE = "untie_embeddings_and_output_weights"
_HALVES = {DType.BFLOAT16: "bf16", DType.FLOAT16: "fp16"}
"""16-bit type to the argument that selects it."""


def check_settings(settings: Mapping[str, object], recorded: Mapping[str, object]) -> None:
    """Raise UsageError naming all settings with an impossible value, or of another type than `recorded` arguments."""
    numbers = {name: value for name, value in settings.items() if name in READ_ARGUMENTS and isinstance(value, int)}
    wrong = [
        *(f"{name}: {number} is below 0" for name, number in numbers.items() if number < 0),
        *(f"{name}: {text}" for name, value in settings.items() if (text := _find_mistype(value, recorded.get(name)))),
    ]
    if wrong:
        raise UsageError(f"expected arguments of Megatron with --set; got\n{format_list(wrong)}")
    try:
        read_arguments(dict(settings), "--set")
    except MalformedError as error:
        raise UsageError(str(error)) from error


def _find_mistype(value: object, recorded: object) -> str:
    """The problem with the type of a value; empty without one."""
    if value is None or not isinstance(recorded, bool | int | float | str | list | tuple):
        return ""
    types = {float: (int, float), tuple: (list,)}.get(type(recorded), (type(recorded),))
    return "" if type(value) in types else f"{value!r}, but the source has {format_value(recorded)}"


def check_consistency(
    settings: Mapping[str, object], model: TargetModel, *, recorded: Mapping[str, object], written: Mapping[str, object]
) -> None:
    """Raise UsageError naming every setting that contradicts the checkpoint to write.

    `recorded`: arguments of the source. `written`: arguments in the checkpoint.
    """
    if not settings:
        return
    lines = [
        f"{name} = {value!r}: --topology, --layout or the written states make it {written[name]!r}"
        for name, value in settings.items()
        if name in written and written[name] != value
    ]
    counts = {"num_layers": (model.layers, "layers"), "num_experts": (model.experts, "experts in a layer")}
    lines += [
        f"{name} = {settings[name]!r}: there are {count} {what}"
        for name, (count, what) in counts.items()
        if name in settings and (settings[name] or 0) != count
    ]
    shapes = model.shapes
    is_untied = OUTPUT in shapes
    if _UNTIE in settings and bool(settings[_UNTIE]) != is_untied:
        lines.append(f"{_UNTIE} = {settings[_UNTIE]!r}: there is {'an' if is_untied else 'no'} {OUTPUT}")
    lines += [*_hybrid_problems(settings, model), *_type_problems(settings, model)]
    old_lines = compare_sizes(model.family, recorded, shapes, pads_on_load=True)
    lines += [line for line in compare_sizes(model.family, written, shapes, pads_on_load=True) if line not in old_lines]
    if lines:
        raise UsageError(
            f"expected values of --set that agree with the checkpoint to write; got\n{format_list(lines)}\n"
            "Drop these settings, or convert a checkpoint of a model that has these values"
        )


def _hybrid_problems(settings: Mapping[str, object], model: TargetModel) -> Iterator[str]:
    """Contradictions between the pattern of a hybrid model and its layers."""
    pattern, letters = hybrid_pattern(settings), layer_letters(model.shapes)
    if pattern is None:
        return
    if any(len(letter) > 1 for letter in letters):
        yield (
            f"hybrid pattern {pattern!r}: every layer has attention and a feed-forward, as in a GPT. A hybrid run of "
            "megatron-core 0.20 can load the checkpoint of a GPT: leave out the pattern"
        )
        return
    layers = pattern.replace("|", "")
    if len(layers) != len(letters) or any(
        a != b for a, b in zip(layers, letters, strict=True) if a in LETTERS.values()
    ):
        yield f"hybrid pattern {pattern!r}: the tensors of the layers give {''.join(letters)!r}"


def _type_problems(settings: Mapping[str, object], model: TargetModel) -> Iterator[str]:
    """Contradictions with the types of the weights; a model with float32 weights may compute in any type."""
    dtypes = {tensor.dtype for tensor in model.tensors if tensor.kind is not Kind.BUFFER and tensor.dtype in _HALVES}
    for dtype, name in _HALVES.items() if dtypes else ():
        if name in settings and bool(settings[name]) != (dtype in dtypes):
            names = " and ".join(sorted(dtype.value for dtype in dtypes))
            yield f"{name} = {settings[name]!r}: the model's weights are {names} (--dtype weight=... casts them)"


_MAMBA = ".mixer.A_log"
_MOST_KINDS = 4
"""Kinds of tensors to name in one line."""


def check_division(run: TargetRun) -> None:
    """Check that a run of this topology can hold the model. Raises TopologyError with all reasons why it cannot."""
    mesh, arguments, model = run.topology, run.arguments, run.model
    problems = [
        find_grid_problem(mesh),
        *_head_problems(mesh.tp, arguments, model),
        *_cut_problems(model, mesh),
        *_vocabulary_problems(run),
        f"experts: ep={mesh.ep}, but the model has no experts" if mesh.ep > 1 and not model.experts else None,
        f"experts: ep={mesh.ep} does not divide {model.experts}" if model.experts % mesh.ep else None,
        stage_problem(model.layers, pp=mesh.pp, vpp=mesh.vpp, arguments=arguments),
    ]
    lines = list(filter(None, problems))
    if lines:
        raise TopologyError(
            f"expected a topology that divides the model into equal parts, as Megatron does; got {mesh} for "
            f"{run.index.path}:\n{format_list(lines, most=40)}\nChoose other degrees"
        )


def _head_problems(tp: int, arguments: Mapping[str, object], model: TargetModel) -> Iterator[str]:
    """Numbers of heads and groups, of attention and Mamba, that tp does not divide."""
    heads = _number(arguments, "num_attention_heads")
    grouped = arguments.get("group_query_attention", True)
    groups = (_number(arguments, "num_query_groups") if grouped else 0) or heads
    if heads % tp:
        yield f"heads: tp={tp} does not divide num_attention_heads={heads}"
    if groups and groups != heads and groups % tp and tp % groups:
        yield f"groups of queries: num_query_groups={groups} is neither a multiple nor a divisor of tp={tp}"
    mamba_heads = next((tensor.shape[0] for tensor in model.tensors if tensor.name.endswith(_MAMBA)), 0)
    mamba_groups = _number(arguments, "mamba_num_groups")
    if mamba_heads % tp:
        yield f"heads of Mamba: tp={tp} does not divide {mamba_heads}"
    if mamba_heads and mamba_groups % tp:
        yield f"groups of Mamba: tp={tp} does not divide mamba_num_groups={mamba_groups}"


def _number(arguments: Mapping[str, object], name: str) -> int:
    """An integer argument; 0 without one."""
    value = arguments.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _cut_problems(model: TargetModel, mesh: Topology) -> Iterator[str]:
    """Dims that an axis does not divide evenly: a line per axis, with every kind of tensor once."""
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
        expected = [piece.box.sizes for piece in place(layout, shape, coords=first)]
        for axis in layout.axes:
            last = {**first, axis.axis: axis.parts - 1}
            if [piece.box.sizes for piece in place(layout, shape, coords=last)] != expected:
                uneven.setdefault(axis.axis, {})[f"{name} {list(shape)}"] = None
    for axis_name, names in uneven.items():
        examples = ", ".join(list(names)[:_MOST_KINDS])
        more = f" and {len(names) - _MOST_KINDS} more like it" if len(names) > _MOST_KINDS else ""
        yield f"dims: {axis_name}={degrees[axis_name]} does not divide {examples}{more}"


def _rows(run: TargetRun) -> tuple[int, int]:
    """Rows of the embedding, with padding, in the files (0 without one) and in the run."""
    rows = run.model.shapes.get(EMBEDDING, (0,))[0]
    return rows, _number(run.arguments, "padded_vocab_size") or rows


def _vocabulary_problems(run: TargetRun) -> Iterator[str]:
    tp, (rows, padded) = run.topology.tp, _rows(run)
    elsewhere = "torch_dist (--layout torch_dist) can be loaded with other padding"
    if rows and padded != rows and run.is_legacy:
        yield f"vocabulary: padded_vocab_size={padded}, but there are {rows} rows; {elsewhere}"
    elif padded % tp:
        multiple = max(_number(run.arguments, "make_vocab_size_divisible_by"), 1) * tp
        option = f"set the number of rows in the run, e.g. --set padded_vocab_size={-(-padded // multiple) * multiple}"
        remedy = elsewhere if run.is_legacy else option
        yield f"vocabulary: tp={tp} does not divide padded_vocab_size={padded}; {remedy}"


def vocabulary_notes(run: TargetRun) -> Iterator[str]:
    """Notes on rows of the vocabulary that the run silently adds or drops."""
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
            f"the vocabulary is padded to {rows} rows, but a run of tp={tp} pads it to a multiple of {multiple}: start "
            f"the run with --make-vocab-size-divisible-by {rows // tp}, or {otherwise}"
        )
