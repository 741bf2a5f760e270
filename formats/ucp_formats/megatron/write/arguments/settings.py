"""What a user says about the run with `--set NAME=VALUE`: arguments of Megatron, checked before they are written.

A wrong argument is worse than none: Megatron takes the model from them (`--use-checkpoint-args`), and so does `ucp`. So
one that the tensors or the topology contradict is no choice either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ucp.core.dtypes import DType
from ucp.core.index import Kind
from ucp.errors import MalformedError, UsageError, listed
from ucp.io.pickle.fields import shown
from ucp_formats.megatron.run.arguments import KNOWN, read_arguments
from ucp_formats.megatron.run.recorded_sizes import sizes_in_doubt
from ucp_formats.megatron.run.stages import hybrid_pattern
from ucp_formats.megatron.write.arguments.derived import LETTERS, layer_letters
from ucp_formats.megatron.write.model import Model

__all__ = ["SETTINGS", "check_asked", "check_settings"]

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
SETTINGS |= dict.fromkeys(sorted(KNOWN - SETTINGS.keys()), "layout and progress of the run")
"""Setting to what it is about."""
_UNTIED = "untie_embeddings_and_output_weights"
_OUTPUT = "output_layer.weight"
_HALVES = {DType.BFLOAT16: "bf16", DType.FLOAT16: "fp16"}
"""Types that a model computes in, by the argument that says so."""


def check_settings(asked: Mapping[str, object], recorded: Mapping[str, object]) -> None:
    """Raise UsageError naming all settings whose value is impossible, or of another kind than what was recorded.

    `recorded`: arguments of the source; empty where it has none.
    """
    wrong = [
        *(f"{name}: {value} is below 0" for name, value in asked.items() if name in KNOWN and _is_negative(value)),
        *(f"{name}: {text}" for name, value in asked.items() if (text := _other_kind(value, recorded.get(name)))),
    ]
    if wrong:
        raise UsageError(f"expected arguments of Megatron with --set; got\n{listed(wrong)}")
    try:
        read_arguments(dict(asked), "--set")
    except MalformedError as error:
        raise UsageError(str(error)) from error


def _is_negative(value: object) -> bool:
    return isinstance(value, int) and value < 0


def _other_kind(value: object, recorded: object) -> str:
    """What is wrong with a value beside the one that was recorded; empty when nothing is."""
    if value is None or not isinstance(recorded, bool | int | float | str | list | tuple):
        return ""
    alike = {float: (int, float), tuple: (list,)}.get(type(recorded), (type(recorded),))
    return "" if type(value) in alike else f"{value!r}, and the source has {shown(recorded)}"


def check_asked(
    asked: Mapping[str, object], model: Model, *, before: Mapping[str, object], written: Mapping[str, object]
) -> None:
    """Raise UsageError naming every value in `asked` that what is written contradicts.

    `before`: the arguments without what was asked for. `written`: those that the checkpoint will carry.
    """
    if not asked:
        return
    lines = [*_overruled(asked, written), *_facts(asked, model), *_layers(asked, model), *_types(asked, model)]
    shapes = model.shapes
    known = sizes_in_doubt(model.family, before, shapes, pads_on_load=True)
    lines += [own for own in sizes_in_doubt(model.family, written, shapes, pads_on_load=True) if own not in known]
    if lines:
        raise UsageError(
            f"expected --set to say what holds for the checkpoint that is written; got\n{listed(lines)}\n"
            "Drop these, or convert a checkpoint of the model that you mean"
        )


def _overruled(asked: Mapping[str, object], written: Mapping[str, object]) -> Iterator[str]:
    """Arguments that follow from the layout and from what is in the files."""
    for name, value in asked.items():
        if name in written and written[name] != value:
            yield f"{name} = {value!r}: it is {written[name]!r} by --topology, --layout and what is written"


def _facts(asked: Mapping[str, object], model: Model) -> Iterator[str]:
    """Counts that names tell."""
    names = {own.name for own in model.tensors}
    counts = {"num_layers": (model.layers, "layers"), "num_experts": (model.experts, "experts in a layer")}
    for name, (count, what) in counts.items():
        if name in asked and (asked[name] or 0) != count:
            yield f"{name} = {asked[name]!r}: there are {count} {what}"
    if _UNTIED in asked and bool(asked[_UNTIED]) != (_OUTPUT in names):
        yield f"{_UNTIED} = {asked[_UNTIED]!r}: there is {'an' if _OUTPUT in names else 'no'} {_OUTPUT}"


def _layers(asked: Mapping[str, object], model: Model) -> Iterator[str]:
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


def _types(asked: Mapping[str, object], model: Model) -> Iterator[str]:
    """Types other than those that the model's tensors have; a model in float32 may compute in any."""
    there = {own.dtype for own in model.tensors if own.kind is not Kind.BUFFER and own.dtype in _HALVES}
    for dtype, name in _HALVES.items() if there else ():
        if name in asked and bool(asked[name]) != (dtype in there):
            held = " and ".join(sorted(own.value for own in there))
            yield f"{name} = {asked[name]!r}: the model's weights are {held} (--dtype weight=... casts them)"
