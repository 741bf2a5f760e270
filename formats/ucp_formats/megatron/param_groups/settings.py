"""What the arguments of a run say of the group that a parameter is in: weight decay, learning rate, optimizer.

Read in megatron-core 0.13.1, 0.15.3, 0.16.1 and 0.19.2, core/optimizer/__init__.py, and in megatron/training:

* Biases and tensors of one dim are not decayed (`wd_mult` 0), in all versions (_get_param_groups; since 0.16
  get_standard_config_overrides).
* `apply_wd_to_qk_layernorm` (0.16 and later): those of `q_layernorm.` and `k_layernorm.` are; before, some
  training scripts asked for it by `no_weight_decay_cond_type`. Of multi-latent attention under Transformer Engine not:
  there the norm is called `linear_q_up_proj.layer_norm_weight`.
* `embedding_init_method_std` (0.14 and 0.15): what has "embedding" in its name is not decayed
  (default_skip_embedding_weight_decay, which training.py passes; it stopped with 0.16).
* `decoupled_lr`: embedding and output layer have a group of their own: `is_decoupled_lr` up to 0.15, since then another
  `max_lr` (and `min_lr`) with `default_config` false.
* `use_mup` (0.17 and later): hidden matrices have `max_lr` and `min_lr` divided by the width, vectors keep theirs; the
  other way round for SGD (get_mup_config_overrides).
* `muon` (0.17 and later), `lion` (0.19 and later): what is not a matrix, and embedding and output layer, name another
  `optimizer`.
* Experts have groups of their own where they are parallel (`is_expert_parallel`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["USUAL", "Expected", "GroupRule", "group_rule", "is_by_named_optimizer", "is_expert"]

_ENDS = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Parameters with `is_embedding_or_output_parameter` (core/models/common/language_module)."""
_ADAM_OR_SGD = ("adam", "sgd")
"""Optimizers that train all parameters of a run alike."""
_QK = ("q_layernorm.", "k_layernorm.")
_ASKS_FOR_QK = ("apply_wd_to_qk_layernorm", "qwen3_next")
"""Values of `no_weight_decay_cond_type`: of Megatron-LM, and of Megatron-Bridge."""


def is_by_named_optimizer(arguments: Mapping[str, object], name: str, shape: tuple[int, ...]) -> bool:
    """Whether the optimizer that a run names trains a parameter, where Adam (or Lion) trains vectors and both ends.

    So it is with Muon and Lion (0.19 core/optimizer/emerging_optimizers.py: default_param_overrides); they keep one
    moment, Adam two.

    >>> is_by_named_optimizer({"optimizer": "lion"}, "decoder.layers.0.mlp.linear_fc2.weight", (8, 12))
    True
    """
    return _optimizer(arguments) not in _ADAM_OR_SGD and len(shape) == 2 and name not in _ENDS


def _optimizer(arguments: Mapping[str, object]) -> str:
    named = arguments.get("optimizer")
    return named.lower() if isinstance(named, str) else "adam"


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to one expert of many.

    >>> is_expert("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight"), is_expert("mlp.shared_experts.x")
    (True, False)
    """
    return ".experts." in name


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the group of one parameter has to look like."""

    decays: bool | None
    """Whether it is decayed; None where the arguments leave that open."""
    flags: Mapping[str, bool]
    """Key that groups of some versions have, to its truth."""
    default_rate: bool | None
    """Whether it keeps the learning rate of the run (`default_config`); None where nothing says so."""
    rates: Mapping[str, float]
    """Bounds of the learning rate, as far as they are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRule:
    """How a run puts its parameters into groups."""

    decays_qk: bool | None = False
    """Whether norms of queries and keys are decayed; None where that is not recorded."""
    decays_embedding: bool | None = True
    """Whether the embedding is decayed; None where that is not recorded."""
    recorded: bool = True
    """Whether arguments were saved."""
    known: bool = True
    """False for a condition on decay that Megatron does not have."""
    rate: tuple[float | None, float | None] = (None, None)
    """Bounds of the learning rate: `lr` and `min_lr`."""
    ends_rate: tuple[float | None, float | None] | None = None
    """Those of embedding and output layer, where they have their own."""
    width: float = 1.0
    """Factor of the width over that of the base model (MuP)."""
    optimizer: str = "adam"
    """Name of the optimizer."""

    def expected(self, name: str, shape: tuple[int, ...]) -> Expected:
        """What the group of a parameter looks like. `shape`: of the whole parameter."""
        own = self._own_rate(name, shape)
        pair = zip(("max_lr", "min_lr"), own or self.rate, strict=True)
        explained = self.ends_rate is not None or self.width != 1.0
        return Expected(
            decays=self.decays(name, shape),
            flags={
                "is_expert_parallel": is_expert(name),
                "is_decoupled_lr": name in _ENDS,
                **({"optimizer": name in _ENDS or len(shape) != 2} if self.optimizer not in _ADAM_OR_SGD else {}),
            },
            default_rate=own is None if explained else None,
            rates={key: value for key, value in pair if value is not None} if explained else {},
        )

    def decays(self, name: str, shape: tuple[int, ...]) -> bool | None:
        """Whether a parameter is decayed; None where that is open."""
        if not self.known:
            return None
        if len(shape) == 1 or name.endswith(".bias"):
            return self.decays_qk if any(part in name for part in _QK) else False
        return self.decays_embedding if "embedding" in name else True

    def _own_rate(self, name: str, shape: tuple[int, ...]) -> tuple[float | None, float | None] | None:
        """The learning rate of a parameter, where it is not that of the run."""
        if self.ends_rate is not None and name in _ENDS:
            return self.ends_rate
        if self.width == 1.0:
            return None
        vector = len(shape) <= 1 or name in _ENDS or "embedding" in name.lower()
        if self.optimizer == "sgd":
            return _scaled(self.rate, self.width) if vector else None
        by_muon = "muon" in self.optimizer and len(shape) == 2
        return None if vector or by_muon else _scaled(self.rate, 1.0 / self.width)

    def told(self) -> str:
        """What the rule is, for the user."""
        return "; ".join(self._parts())

    def open(self) -> str:
        """What the arguments leave open, for the user."""
        if not self.recorded:
            return "arguments were not saved; apply_wd_to_qk_layernorm, embedding_init_method_std, decoupled_lr decide"
        if not self.known:
            return "the no_weight_decay_cond_type in the arguments is none of Megatron's"
        return "by the arguments it fits none of the groups, or several that differ"

    def _parts(self) -> Iterator[str]:
        if not self.recorded:
            yield "which were not saved"
        yield "biases and tensors of one dim are not decayed"
        if self.decays_qk:
            yield "norms of q and k are (apply_wd_to_qk_layernorm)"
        if self.decays_embedding is False:
            yield "nor is the embedding (embedding_init_method_std)"
        if self.ends_rate is not None:
            yield "embedding and output layer have a learning rate of their own (decoupled_lr)"
        if self.width != 1.0:
            yield f"learning rates go by the width (use_mup, {self.width:g})"


USUAL = GroupRule()
"""The rule of a run without any of these arguments."""


def group_rule(arguments: Mapping[str, object], groups: Sequence[Mapping[str, object]]) -> GroupRule:
    """The rule of a run, by its arguments and by the hyper-parameters of its groups.

    Both tell a version from 0.16 on: groups by `default_config`, unless they were loaded from an older checkpoint.
    Without arguments it stays open what the version lets them decide.
    """
    modern = "apply_wd_to_qk_layernorm" in arguments or any("default_config" in group for group in groups)
    if not arguments:
        return GroupRule(recorded=False, decays_qk=None if modern else False, decays_embedding=True if modern else None)
    condition = arguments.get("no_weight_decay_cond_type")
    spared = not modern and arguments.get("embedding_init_method_std") is not None
    rate = _number(arguments, "lr"), _number(arguments, "min_lr")
    ends = _number(arguments, "decoupled_lr"), _number(arguments, "decoupled_min_lr")
    asks = bool(arguments.get("apply_wd_to_qk_layernorm")) or condition in _ASKS_FOR_QK
    fused = bool(arguments.get("multi_latent_attention")) and arguments.get("transformer_impl") != "local"
    return GroupRule(
        decays_qk=asks and not fused,
        decays_embedding=not spared,
        known=condition is None or condition in _ASKS_FOR_QK,
        rate=rate,
        ends_rate=None if ends[0] is None else (ends[0], rate[1] if ends[1] is None else ends[1]),
        width=_width(arguments),
        optimizer=_optimizer(arguments),
    )


def _width(arguments: Mapping[str, object]) -> float:
    """`mup_width_mult`, as TransformerConfig makes it (0.19.2 core/transformer/transformer_config.py)."""
    hidden, base = _number(arguments, "hidden_size"), _number(arguments, "mup_base_hidden_size")
    return hidden / base if arguments.get("use_mup") and hidden and base else 1.0


def _scaled(rate: tuple[float | None, float | None], factor: float) -> tuple[float | None, float | None]:
    high, low = rate
    return (None if high is None else high * factor, None if low is None else low * factor)


def _number(arguments: Mapping[str, object], key: str) -> float | None:
    value = arguments.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
