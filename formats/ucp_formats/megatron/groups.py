"""Assigns parameters to optimizer groups by Megatron's rule, because checkpoints do not record the members of groups.

From the arguments of a run follow the weight decay, learning rate and optimizer of every parameter; its group is the
saved group with these settings. Learning rates are compared only if several groups remain: a run that was resumed with
other rates keeps those that its groups were saved with.

The rule, from megatron-core 0.13.1, 0.15.3, 0.16.1 and 0.19.2, core/optimizer/__init__.py, and from megatron/training:

* Biases and tensors of one dim are not decayed (`wd_mult` 0), in all versions (_get_param_groups; since 0.16
  get_standard_config_overrides).
* `apply_wd_to_qk_layernorm` (0.16 and later): `q_layernorm.` and `k_layernorm.` are decayed; before, some training
  scripts asked for it by `no_weight_decay_cond_type`. Not with multi-latent attention under Transformer Engine, where
  the norm is called `linear_q_up_proj.layer_norm_weight`.
* `embedding_init_method_std` (0.14 and 0.15): names with "embedding" are not decayed
  (default_skip_embedding_weight_decay, which training.py passes; not since 0.16).
* `decoupled_lr`: embedding and output layer have their own group: `is_decoupled_lr` up to 0.15, since then another
  `max_lr` (and `min_lr`) with `default_config` false.
* `use_mup` (0.17 and later): `max_lr` and `min_lr` of hidden matrices are divided by the width multiplier, except for
  matrices that Muon trains; with SGD, those of vectors are multiplied by it instead (get_mup_config_overrides).
* `muon` (0.17 and later), `lion` (0.19 and later): vectors, embedding and output layer have another `optimizer`.
* With expert parallelism, experts have their own groups (`is_expert_parallel`).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ucp.core.index import STEP, LostStates, ParamGroup
from ucp.errors import format_count
from ucp_formats.megatron.names import EMBEDDING, OUTPUT

_ENDS = (EMBEDDING, OUTPUT)
"""Parameters with `is_embedding_or_output_parameter` (core/models/common/language_module)."""
_ADAM_OR_SGD = ("adam", "sgd")
"""Optimizers that train all parameters of a run alike."""
_QK = ("q_layernorm.", "k_layernorm.")
_DECAYS_QK = ("apply_wd_to_qk_layernorm", "qwen3_next")
"""Values of `no_weight_decay_cond_type` that decay these norms, in Megatron-LM and in Megatron-Bridge."""
_EXPERT = re.compile(r"(?P<layer>.+\.local_experts)\.(?P<number>\d+)\.(?P<rest>.+)")

_Rate = tuple[float | None, float | None]
"""Bounds of a learning rate: `max_lr` and `min_lr`."""


def is_by_named_optimizer(arguments: Mapping[str, object], name: str, shape: tuple[int, ...]) -> bool:
    """Whether Muon or Lion trains a parameter, if the run names one of them as its optimizer.

    Both train matrices only, and neither embedding nor output layer (0.19 core/optimizer/emerging_optimizers.py:
    default_param_overrides): Adam, or Lion beside Muon, trains the others. They keep one moment, Adam two.

    >>> is_by_named_optimizer({"optimizer": "lion"}, "decoder.layers.0.mlp.linear_fc2.weight", (8, 12))
    True
    """
    return _optimizer(arguments) not in _ADAM_OR_SGD and len(shape) == 2 and name not in _ENDS


def _optimizer(arguments: Mapping[str, object]) -> str:
    name = arguments.get("optimizer")
    return name.lower() if isinstance(name, str) else "adam"


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to a routed expert.

    >>> is_expert("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight"), is_expert("mlp.shared_experts.x")
    (True, False)
    """
    return ".experts." in name


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedGroup:
    """A parameter group as it was saved: without the names of its parameters."""

    chain: int | None
    """Number of its optimizer in a ChainedOptimizer, if known."""
    hyper: Mapping[str, object]
    """Its hyper-parameters."""

    @property
    def decays(self) -> bool | None:
        """Whether its parameters have weight decay; None if that is not recorded."""
        scale = self.hyper.get("wd_mult")
        if not isinstance(scale, int | float):
            scale = self.hyper.get("weight_decay")
        return bool(scale) if isinstance(scale, int | float) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRule:
    """How a run assigns parameters to groups."""

    decays_qk: bool | None = False
    """Whether norms of queries and keys have weight decay; None if that is not recorded."""
    decays_embedding: bool | None = True
    """Whether the embedding has weight decay; None if that is not recorded."""
    recorded: bool = True
    """Whether arguments were saved."""
    known: bool = True
    """False if `no_weight_decay_cond_type` has a value that Megatron does not know."""
    rate: _Rate = (None, None)
    """Learning rate of the run."""
    ends_rate: _Rate | None = None
    """Learning rate of embedding and output layer, if they have their own."""
    width: float = 1.0
    """Width of the model over that of the base model (MuP)."""
    optimizer: str = "adam"
    """Name of the optimizer."""

    def find_groups(self, groups: Sequence[SavedGroup], name: str, shape: tuple[int, ...]) -> Sequence[int]:
        """Numbers of the groups that a parameter may be in. `shape`: of the global tensor."""
        numbers = [number for number, group in enumerate(groups) if self._allows(group, groups, name, shape)]
        for key, bound in zip(("max_lr", "min_lr"), self._special_rate(name, shape) or self.rate, strict=True):
            if bound is not None and self._has_special_rates:
                numbers = [number for number in numbers if groups[number].hyper.get(key) == bound] or numbers
        return numbers

    @property
    def _has_special_rates(self) -> bool:
        return self.ends_rate is not None or self.width != 1.0

    def _allows(self, group: SavedGroup, groups: Sequence[SavedGroup], name: str, shape: tuple[int, ...]) -> bool:
        """Whether a parameter may be in `group`, one of `groups`. Learning rates are not compared here."""
        decays = self.decays(name, shape)
        if (
            None not in (decays, group.decays)
            and decays != group.decays
            and len({other.decays for other in groups}) > 1
        ):
            return False
        flags = {"is_expert_parallel": is_expert(name), "is_decoupled_lr": name in _ENDS}
        if self.optimizer not in _ADAM_OR_SGD:
            flags["optimizer"] = name in _ENDS or len(shape) != 2
        for key, flag in flags.items():
            if bool(group.hyper.get(key)) != flag and any(other.hyper.get(key) for other in groups):
                return False
        defaults = [other.hyper.get("default_config") for other in groups]
        if not self._has_special_rates or None in defaults or len(set(map(bool, defaults))) == 1:
            return True
        return bool(group.hyper["default_config"]) == (self._special_rate(name, shape) is None)

    def decays(self, name: str, shape: tuple[int, ...]) -> bool | None:
        """Whether a parameter has weight decay; None if unknown."""
        if not self.known:
            return None
        if len(shape) == 1 or name.endswith(".bias"):
            return self.decays_qk if any(norm in name for norm in _QK) else False
        return self.decays_embedding if "embedding" in name else True

    def _special_rate(self, name: str, shape: tuple[int, ...]) -> _Rate | None:
        """The learning rate of a parameter, if it is not that of the run."""
        if self.ends_rate is not None and name in _ENDS:
            return self.ends_rate
        if self.width == 1.0:
            return None
        is_vector = len(shape) <= 1 or name in _ENDS or "embedding" in name.lower()
        is_sgd, by_muon = self.optimizer == "sgd", "muon" in self.optimizer and len(shape) == 2
        if is_vector != is_sgd or (by_muon and not is_sgd):
            return None
        factor = self.width if is_sgd else 1.0 / self.width
        high, low = self.rate
        return None if high is None else high * factor, None if low is None else low * factor

    def describe_gap(self) -> str:
        """Why the rule leaves parameters without a group, for the user."""
        if not self.recorded:
            return (
                "it depends on apply_wd_to_qk_layernorm, embedding_init_method_std and decoupled_lr, and the arguments "
                "were not saved"
            )
        if not self.known:
            return "the no_weight_decay_cond_type in the arguments is not one of Megatron's"
        return "by the arguments, each fits none of the groups, or several that differ"

    def describe(self) -> Iterator[str]:
        """The rule, for the user."""
        if not self.recorded:
            yield "the arguments were not saved"
        yield "biases and tensors of one dim have no weight decay"
        if self.decays_qk:
            yield "norms of q and k have weight decay (apply_wd_to_qk_layernorm)"
        if self.decays_embedding is False:
            yield "the embedding has no weight decay (embedding_init_method_std)"
        if self.ends_rate is not None:
            yield "embedding and output layer have a separate learning rate (decoupled_lr)"
        if self.width != 1.0:
            yield f"learning rates depend on the width multiplier (use_mup, {self.width:g})"


DEFAULT_RULE = GroupRule()
"""The rule of a run without any of these arguments."""


def group_rule(arguments: Mapping[str, object], groups: Sequence[Mapping[str, object]]) -> GroupRule:
    """The rule of a run, by its arguments and by the hyper-parameters of its groups.

    Both show whether the version is 0.16 or later; groups show it by `default_config`, unless they were loaded from an
    older checkpoint. If no arguments were saved, it is unknown whether norms of queries and keys (0.16 and later) or
    the embedding (before) have weight decay.
    """
    is_modern = "apply_wd_to_qk_layernorm" in arguments or any("default_config" in group for group in groups)
    if not arguments:
        return GroupRule(
            recorded=False, decays_qk=None if is_modern else False, decays_embedding=True if is_modern else None
        )
    condition = arguments.get("no_weight_decay_cond_type")
    rate = _number(arguments, "lr"), _number(arguments, "min_lr")
    ends = _number(arguments, "decoupled_lr"), _number(arguments, "decoupled_min_lr")
    hidden, base = _number(arguments, "hidden_size"), _number(arguments, "mup_base_hidden_size")
    has_fused_norms = bool(arguments.get("multi_latent_attention")) and arguments.get("transformer_impl") != "local"
    return GroupRule(
        decays_qk=(bool(arguments.get("apply_wd_to_qk_layernorm")) or condition in _DECAYS_QK) and not has_fused_norms,
        decays_embedding=is_modern or arguments.get("embedding_init_method_std") is None,
        known=condition is None or condition in _DECAYS_QK,
        rate=rate,
        ends_rate=None if ends[0] is None else (ends[0], rate[1] if ends[1] is None else ends[1]),
        # `mup_width_mult`, as TransformerConfig computes it (0.19.2 core/transformer/transformer_config.py)
        width=hidden / base if arguments.get("use_mup") and hidden and base else 1.0,
        optimizer=_optimizer(arguments),
    )


def _number(arguments: Mapping[str, object], name: str) -> float | None:
    value = arguments.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def expert_numbers(names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Parameter of an expert to the number of the expert, and how many experts its layer has.

    >>> expert_numbers(["mlp.experts.local_experts.0.w", "mlp.experts.local_experts.1.w", "router"])
    {'mlp.experts.local_experts.0.w': (0, 2), 'mlp.experts.local_experts.1.w': (1, 2)}
    """
    matches = {name: match for name in names if (match := _EXPERT.fullmatch(name)) is not None}
    counts: dict[tuple[str, str], int] = {}
    for match in matches.values():
        layer = match["layer"], match["rest"]
        counts[layer] = max(counts.get(layer, 0), int(match["number"]) + 1)
    return {name: (int(match["number"]), counts[match["layer"], match["rest"]]) for name, match in matches.items()}


def assign_params(
    groups: Sequence[SavedGroup],
    shapes: Mapping[str, tuple[int, ...]],
    chains: Mapping[str, int | None],
    rule: GroupRule = DEFAULT_RULE,
) -> tuple[tuple[ParamGroup, ...], list[str]]:
    """The groups with the names of their parameters, and the parameters that fit none, or several that differ.

    Of equal groups, the first takes the parameters.

    `shapes`: trained parameter to its shape, in the order of registration. `chains`: parameter to the number of its
    optimizer in a chain, if known. `rule`: of the run.
    """
    members: list[list[str]] = [[] for _ in groups]
    unassigned = []
    for name, shape in shapes.items():
        numbers = range(len(groups)) if len(groups) == 1 else rule.find_groups(groups, name, shape)
        if name in chains and len(groups) > 1:
            numbers = [number for number in numbers if groups[number].chain == chains[name]]
        if numbers and all(groups[number].hyper == groups[numbers[0]].hyper for number in numbers):
            members[numbers[0]].append(name)
        else:
            unassigned.append(name)
    pairs = zip(groups, members, strict=True)
    return tuple(ParamGroup(params=tuple(names), hyper=dict(group.hyper)) for group, names in pairs), unassigned


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignedGroups:
    """The groups of a run, and what is unknown about them."""

    groups: tuple[ParamGroup, ...]
    """The saved groups, with the names of their parameters."""
    lost: Mapping[str, LostStates]
    """Parameters whose group is unknown, and why."""
    step: object
    """Step of the parameters in `lost`: the one that all groups record; None if groups differ or record none."""
    note: str
    """How parameters were assigned, for the user."""
    dropped: tuple[str, ...]
    """`lost` as an entry of `Index.dropped`; empty if none is lost."""


def assign_groups(
    saved: Sequence[SavedGroup],
    shapes: Mapping[str, tuple[int, ...]],
    arguments: Mapping[str, object],
    chains: Mapping[str, int | None] | None = None,
) -> AssignedGroups:
    """The groups of a run with these arguments; `shapes`, `chains`: as in `assign_params`."""
    rule = group_rule(arguments, [group.hyper for group in saved])
    groups, unassigned = assign_params(saved, shapes, chains or {}, rule)
    why = (
        f"the optimizer group of {format_count(len(unassigned), 'parameter')}, which is not recorded: "
        f"{rule.describe_gap()}. Megatron records groups with --ckpt-format torch and without "
        "--use-distributed-optimizer: save the checkpoint that way"
    )
    lines = "\n".join(f"  {name}: {list(shapes[name])}" for name in unassigned)
    steps = [group.hyper[STEP] for group in saved if group.hyper.get(STEP) is not None]
    return AssignedGroups(
        groups=groups,
        lost={name: LostStates(reason=why, detail=str(list(shapes[name]))) for name in unassigned},
        step=steps[0] if steps and all(type(step) is type(steps[0]) and step == steps[0] for step in steps) else None,
        note="the members of optimizer groups are not recorded: assigned by Megatron's rule and the arguments "
        f"({'; '.join(rule.describe())}). If the run passed a no_weight_decay_cond or config_overrides, its groups may "
        "differ from these",
        dropped=(f"{why}\n{lines}",) if unassigned else (),
    )


def drop_rank_settings(group: ParamGroup, names_with_step: Container[str]) -> ParamGroup:
    """The group without settings that depend on the topology of the run or repeat a state of its parameters.

    `is_expert_parallel` is true only with expert parallelism. The step is dropped if every parameter of the group has
    it as a state. `names_with_step`: names of the parameters that do.
    """
    settings = {"is_expert_parallel"}
    if all(name in names_with_step for name in group.params):
        settings.add(STEP)
    return replace(group, hyper={key: value for key, value in group.hyper.items() if key not in settings})
