"""What a user says about the run with `--set NAME=VALUE`: arguments of Megatron, checked before they are written.

A wrong argument is worse than none: Megatron takes the model from them (`--use-checkpoint-args`), and so does `ucp`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ucp.errors import MalformedError, UsageError, listed
from ucp.io.pickle.fields import shown
from ucp_formats.megatron.run.arguments import KNOWN, read_arguments

__all__ = ["SETTINGS", "check_settings", "settings_of"]

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
        "rotary_interleaved"
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
        "weight_decay lr min_lr decoupled_lr decoupled_min_lr lr_decay_style lr_decay_steps lr_warmup_steps"
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


def settings_of(texts: Mapping[str, str]) -> dict[str, object]:
    """Values of arguments that a user wrote.

    >>> settings_of({"num_attention_heads": "32", "swiglu": "true", "moe_layer_freq": "[0,1]"})
    {'num_attention_heads': 32, 'swiglu': True, 'moe_layer_freq': [0, 1]}
    """
    return {name: _value_of(text) for name, text in texts.items()}


def _value_of(text: str) -> object:
    plain: Mapping[str, object] = {"true": True, "false": False, "none": None}
    if text.lower() in plain:
        return plain[text.lower()]
    for kind in (int, float, json.loads):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


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
