"""Which modules a run builds its layers from: megatron-core's own (`transformer_impl` "local") or Transformer Engine's.

Keys depend on the modules, so a run with one kind does not find every key that was written for the other. Readers
translate keys to canonical names, and record in an extra which modules the keys show. A target uses the modules that
the user asks for, else those in the extra, else those in the recorded arguments, else Megatron's default.

| norm before | in | megatron-core's own | Transformer Engine's |
|---|---|---|---|
| attention | files of ranks | `input_layernorm.weight` | `self_attention.linear_qkv.layer_norm_weight` |
| attention, a dense layer | torch_dist of a GPT | `self_attention.linear_qkv.layer_norm_weight`, ... | the same |
| experts | torch_dist of a GPT | `mlp.linear_fc1.layer_norm_weight` | `pre_mlp_layernorm.weight` |
| a dense layer | torch_dist, other models | `pre_mlp_layernorm.weight` | `mlp.linear_fc1.layer_norm_weight` |

Other models: those with multi-latent attention, and hybrids.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ucp.core.index import Index
from ucp.errors import UsageError
from ucp.families.family import Family
from ucp_formats.megatron.names import MODULES

_ARGUMENT = "transformer_impl"
_GROUPED = "moe_grouped_gemm"
_SEEN = "seen_in"
_LOCAL, _ENGINE = "local", "transformer_engine"
_VALUES = (_LOCAL, _ENGINE, "inference_optimized")
"""Values of `transformer_impl` in Megatron; the last one has the keys of Transformer Engine's modules."""
_NORM = re.compile(r"norm\.(weight|bias)$")
_NUMBER = re.compile(r"\blayers\.\d+\.")
_GROUPED_KEY = re.compile(r"\.experts\.linear_fc[12]\.(weight|bias)\d+$")
"""Example: decoder.layers.0.mlp.experts.linear_fc1.weight3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleChoice:
    """The modules for which a checkpoint is written."""

    settings: Mapping[str, object]
    """Arguments of Megatron that select them."""
    known_from: str
    """Why they were chosen, for the note; empty for the default."""

    def note(self, *, same_keys: bool) -> str:
        """The choice and the reason for it. `same_keys`: whether the other modules have the same keys."""
        local = self.settings[_ARGUMENT] == _LOCAL
        which = "megatron-core's own" if local else "Transformer Engine's"
        keys = f"keys are those of {which} modules (transformer_impl {self.settings[_ARGUMENT]})"
        if self.known_from:
            return f"{keys}, as {self.known_from}"
        if same_keys:
            return (
                f"the source does not record whether its layers were built from megatron-core's own modules or from "
                f"Transformer Engine's ({_ARGUMENT}): runs with either find the written keys"
            )
        return (
            f"{keys}, Megatron's default, because the source does not say from which modules its layers were built. A "
            "run with megatron-core's own modules does not find all of these keys: to write for such a run, add --set "
            f"{_ARGUMENT}={_LOCAL}"
        )


def find_modules(family: Family, keys: Mapping[str, str], *, renamed: bool) -> dict[str, object]:
    """The modules that the keys show, as arguments of Megatron, and in `seen_in` a key that shows them.

    Empty if all keys fit both kinds, or if keys of both kinds occur.

    Parameters
    ----------
    family
        Rules of the model.
    keys
        Stored key to canonical name, with `{layer}` if the key has no layer number.
    renamed
        Whether these are keys of torch_dist, in which the specs of GPT layers rename norms.
    """
    names = {key: name.replace("{layer}", "0") for key, name in keys.items()}
    with_experts = {name.partition(".mlp.")[0] for name in names.values() if ".mlp.experts." in name}
    specs = renamed and not any(".mixer." in name for name in names.values())
    grouped = next((key for key in keys if _GROUPED_KEY.search(key)), None)
    seen = {} if grouped is None else {_ENGINE: grouped}
    for key, name in names.items():
        if not _NORM.search(name):
            continue
        before, norm, _ = name.partition(".pre_mlp_layernorm.")
        local = {family.to_style(name, "torch_dist") if specs else name}
        engine = {name}
        if not norm or before not in with_experts:  # the name that is written, and others that are read
            written, *others = [names[0] for _, names in family.find_spellings(name, "te")]
            engine = {written, *others} - ({name} if written != name else set())
        outline = _NUMBER.sub("layers.", key, count=1)
        fits = [
            kind
            for kind, names_of_kind in ((_LOCAL, local), (_ENGINE, engine))
            if any(outline == _NUMBER.sub("layers.", other, count=1) for other in names_of_kind)
        ]
        if len(fits) == 1:
            seen.setdefault(fits[0], key)
    if len(seen) != 1:
        return {}
    ((kind, key),) = seen.items()
    return {_ARGUMENT: kind, **({_GROUPED: True} if grouped else {}), _SEEN: key}


def find_modules_by_state(empty: Collection[str]) -> dict[str, object]:
    """The modules that empty `_extra_state` entries show; `empty`: their names, without `/shard_...`.

    Linear layers of both kinds have one; of the attention modules, only Transformer Engine's has. `ucp` always writes
    both, so the recorded arguments take precedence over this.
    """
    attention = next((name for name in empty if name.endswith(".core_attention._extra_state")), None)
    linear = next((name for name in empty if name.endswith(".linear_proj._extra_state")), None)
    if attention is None and linear is None:
        return {}
    return {_ARGUMENT: _LOCAL if attention is None else _ENGINE, _SEEN: attention or linear}


def is_recorded(arguments: Mapping[str, object]) -> bool:
    """Whether the arguments say from which modules the layers were built."""
    return arguments.get(_ARGUMENT) in _VALUES


def with_modules(arguments: Mapping[str, object], shown: Mapping[str, object]) -> Mapping[str, object]:
    """`arguments` completed by the modules in `shown`, if arguments were saved and do not name modules."""
    if not arguments or is_recorded(arguments) or _ARGUMENT not in shown:
        return arguments
    return {**arguments, _ARGUMENT: shown[_ARGUMENT]}


def choose_modules(index: Index, recorded: Mapping[str, object], requested: Mapping[str, object]) -> ModuleChoice:
    """The modules to write for. `recorded`: arguments of the source; `requested`: arguments that the user gave.

    Raises UsageError if Megatron has no such modules.
    """
    if requested.get(_ARGUMENT, _ENGINE) not in _VALUES:
        raise UsageError(f"expected {_ARGUMENT} to be one of {', '.join(_VALUES)}; got {requested[_ARGUMENT]!r}")
    extra_value = next((extra.value for extra in index.extras if extra.name == MODULES), None)
    shown = extra_value if isinstance(extra_value, dict) else {}
    settings = {_GROUPED: shown[_GROUPED]} if _GROUPED in shown and _GROUPED not in recorded else {}
    recorded_kind, seen = recorded.get(_ARGUMENT), shown.get(_ARGUMENT)
    evidence = f" and its keys ({shown.get(_SEEN)}) show" if seen in _VALUES else " say"
    chosen, why = recorded_kind, f"the arguments of the source{evidence}"
    if _ARGUMENT in requested:
        chosen, why = requested[_ARGUMENT], "--set asks for"
    elif seen in _VALUES and (recorded_kind not in _VALUES or (recorded_kind == _LOCAL) != (seen == _LOCAL)):
        against = f", though its arguments say {recorded_kind}" if recorded_kind in _VALUES else ""
        chosen, why = seen, f"the key {shown.get(_SEEN)} of the source shows{against}"
    elif recorded_kind not in _VALUES:
        chosen, why = _ENGINE, ""
    return ModuleChoice(settings={**settings, _ARGUMENT: chosen}, known_from=why)
