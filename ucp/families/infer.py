"""Rules proposed from what the ranks of one checkpoint hold, for a model that no family knows.

1. `template_of` leaves the numbers of layers and experts in a name open; names of one template are looked at together.
2. `proposed` decides how a template lies over an axis, from shapes, from how the parts compare, and from recorded
   sizes; every proposal says how sure it is and why.
3. `as_toml` writes a rules file for a person to read, correct and pass with --patterns. What stays open is written as a
   comment, so that the file is refused until it is decided.

>>> seen = Observed(name="layers.3.up.weight", axis="tp", shapes=((8, 4), (8, 4)), compared=Compared.DIFFERENT)
>>> proposal = proposed([seen], {"hidden_size": 4})
>>> proposal.template, proposal.pattern, proposal.certainty.value
('layers.{layer}.up.weight', '{ pattern = "shard", dim = 0 }', 'likely')
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Certainty", "Compared", "Observed", "Proposal", "as_toml", "proposed", "template_of"]

_HIDDEN = ("hidden_size", "d_model", "n_embd")
"""Arguments that name the length of the hidden state."""

_ROW_WORDS = frozenset(
    ("dense_4h_to_h", "linear_fc2", "fc2", "down_proj", "c_proj", "linear_proj", "o_proj", "out_proj", "w2")
)
"""Modules that frameworks cut by columns (row-parallel), by their usual names."""

_COLUMN_WORDS = frozenset(
    (
        *("query_key_value", "linear_qkv", "q_proj", "k_proj", "v_proj", "c_attn", "c_fc"),
        *("dense_h_to_4h", "linear_fc1", "fc1", "gate_proj", "up_proj", "w1", "w3"),
        *("word_embeddings", "embed_tokens", "wte", "output_layer", "lm_head"),
    )
)
"""Modules that they cut by rows (column-parallel, or by vocabulary)."""

_ATTENTION = re.compile(r"qkv|query|att", re.IGNORECASE)
"""In names of fused projections that are no gates, though their lengths may look like one."""

_FIELDS = {"layers": "layer", "h": "layer", "blocks": "layer", "local_experts": "expert", "experts": "expert"}
"""Module in front of a number to what the number counts."""


class Compared(StrEnum):
    """How the parts of a tensor compare."""

    EQUAL = "equal"
    """Bit for bit the same, and not all one value."""
    CONSTANT = "constant"
    """All elements of all parts are one value: nothing can be told."""
    CLOSE = "close"
    """Different, but nearly the same: copies that drifted apart."""
    DIFFERENT = "different"
    """Different."""
    ALONE = "alone"
    """There is one part only."""


class Certainty(StrEnum):
    """How sure a proposal is."""

    SURE = "sure"
    """Only this fits what was seen."""
    LIKELY = "likely"
    """A recorded size speaks for it."""
    GUESS = "guess"
    """Only the name speaks for it."""
    OPEN = "open"
    """Nothing speaks for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One tensor as the ranks along an axis hold it."""

    name: str
    """Name in the checkpoint."""
    axis: str
    """Mesh axis, "tp" or "etp"."""
    shapes: tuple[tuple[int, ...], ...]
    """Local shape on every rank of the axis, in order."""
    compared: Compared
    """How the parts compare."""
    cut: tuple[int, int] | None = None
    """Dim and blocks, where the checkpoint records which boxes of the whole the ranks hold; blocks 0: not cut."""
    recorded: str = ""
    """Pattern as a rules file has it, where the checkpoint is read by one."""
    is_whole: bool = False
    """Whether `shapes` is that of the whole: the parts are of different lengths, which are not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """How the parameters of a template may lie."""

    template: str
    """Name, numbers of layers and experts left open."""
    axis: str
    """Mesh axis."""
    pattern: str
    """As it stands in a rules file; empty when nothing can be said."""
    certainty: Certainty
    """How sure."""
    why: str
    """What was seen."""
    count: int
    """Tensors that were looked at."""


def template_of(name: str) -> str:
    """The name with its numbers of layers, experts and other repeated modules left open.

    >>> template_of("model.layers.3.mlp.experts.12.w1.weight")
    'model.layers.{layer}.mlp.experts.{expert}.w1.weight'
    """
    parts = name.split(".")
    used: list[str] = []
    for at, part in enumerate(parts):
        if part.isascii() and part.isdigit():
            field = _FIELDS.get(parts[at - 1] if at else "", "number")
            while field in used:
                field += "_x"
            used.append(field)
            parts[at] = f"{{{field}}}"
    return ".".join(parts)


def proposed(seen: Sequence[Observed], arguments: Mapping[str, object], siblings: Sequence[Observed] = ()) -> Proposal:
    """How the tensors of one template lie over their axis.

    `seen`: all of them, of one axis. `arguments`: as recorded. `siblings`: tensors of the same module's other
    parameters and neighbours, which tell a fused gate.
    """
    first = seen[0]
    found = {own.compared for own in seen}
    shown = " and ".join(dict.fromkeys(str([list(shape) for shape in own.shapes[:2]]) for own in seen[:2]))

    def proposal(pattern: str, certainty: Certainty, why: str) -> Proposal:
        return Proposal(
            template=template_of(first.name),
            axis=first.axis,
            pattern=pattern,
            certainty=certainty,
            why=f"{why}; {'cut from' if first.is_whole else 'parts of'} {shown}",
            count=len(seen),
        )

    if any(own.recorded for own in seen):
        patterns = {own.recorded for own in seen}
        if len(patterns) > 1:
            return proposal("", Certainty.OPEN, "layers are recorded to lie in different ways")
        return proposal(patterns.pop(), Certainty.LIKELY, "that is how the checkpoint is read")
    if any(own.cut is not None for own in seen):
        return proposal(*_recorded(seen))
    if found == {Compared.ALONE}:
        return proposal("", Certainty.OPEN, "one rank only: whether more would share it cannot be seen")
    if found <= {Compared.EQUAL, Compared.CONSTANT}:
        sure = Compared.EQUAL in found
        why = "all ranks hold the same bits" if sure else "every element of every rank has one value"
        return proposal('"replicate"' if sure else "", Certainty.SURE if sure else Certainty.OPEN, why)
    if Compared.EQUAL in found:
        return proposal("", Certainty.OPEN, "some layers are equal on all ranks, others are not")
    if found <= {Compared.CLOSE, Compared.CONSTANT} and len(set(first.shapes)) == 1:
        return proposal(
            '"partial"', Certainty.LIKELY, "ranks hold nearly, not quite, the same: copies that drifted apart"
        )
    dim, certainty, why = _cut_dim(seen, arguments)
    if dim is None:
        return proposal("", certainty, why)
    return proposal(*_with_gate(dim, certainty, why, seen=seen, arguments=arguments, siblings=siblings))


def _recorded(seen: Sequence[Observed]) -> tuple[str, Certainty, str]:
    """What boxes that the checkpoint records say."""
    cuts = {own.cut for own in seen}
    if len(cuts) != 1:
        return "", Certainty.OPEN, "layers are cut in different ways"
    (cut,) = cuts
    if cut is None or cut[1] == 0:
        return '"replicate"', Certainty.LIKELY, "stored once, in one piece"
    dim, blocks = cut
    if blocks > 1:
        listed = ", ".join([f'"dim / {blocks}"'] * blocks)
        why = f"every rank stored {blocks} pieces of dim {dim}"
        return f'{{ pattern = "shard", dim = {dim}, blocks = [{listed}] }}', Certainty.LIKELY, why
    return f'{{ pattern = "shard", dim = {dim} }}', Certainty.LIKELY, f"stored in one piece of dim {dim} per rank"


def _cut_dim(seen: Sequence[Observed], arguments: Mapping[str, object]) -> tuple[int | None, Certainty, str]:
    """Dim that parts of different values are cut along."""
    first = seen[0]
    dims = len(first.shapes[0])
    uneven = {dim for own in seen for dim in range(dims) if len({shape[dim] for shape in own.shapes}) > 1}
    if len(uneven) == 1:
        return uneven.pop(), Certainty.SURE, "parts differ in the length of one dim"
    if dims == 1:
        return 0, Certainty.LIKELY, "parts of a vector differ"
    hidden = next((arguments[key] for key in _HIDDEN if isinstance(arguments.get(key), int)), None)
    others = [dim for dim in range(dims) if first.shapes[0][dim] != hidden]
    if hidden is not None and len(others) == 1 and dims == 2:
        return others[0], Certainty.LIKELY, f"dim {1 - others[0]} is hidden_size, {hidden}, the other is not"
    words = set(first.name.split("."))
    if words & _ROW_WORDS:
        return dims - 1, Certainty.GUESS, "its name is that of a row-parallel layer"
    if words & _COLUMN_WORDS:
        return 0, Certainty.GUESS, "its name is that of a column-parallel layer"
    return None, Certainty.OPEN, "parts differ, and nothing tells which dim is cut"


def _with_gate(
    dim: int,
    certainty: Certainty,
    why: str,
    *,
    seen: Sequence[Observed],
    arguments: Mapping[str, object],
    siblings: Sequence[Observed],
) -> tuple[str, Certainty, str]:
    """A cut of `dim`, in two blocks where the tensor is twice as long as what follows it, as a fused gate is."""
    length = seen[0].shapes[0][dim]
    halves = [own for own in siblings if own.shapes[0][-1] * 2 == length and len(own.shapes[0]) == 2]
    plain = f'{{ pattern = "shard", dim = {dim} }}'
    if dim != 0 or not halves or _ATTENTION.search(seen[0].name):
        return plain, certainty, why
    fused = '{ pattern = "shard", dim = 0, blocks = ["dim / 2", "dim / 2"] }'
    twice = f"{why}; twice as long as {halves[0].name}"
    if arguments.get("swiglu") or arguments.get("gated_linear_unit"):
        return fused, Certainty.LIKELY, f"{twice}, and the run is gated"
    return fused, Certainty.GUESS, f"{twice}, as gate and up projection in one are"


def as_toml(name: str, proposals: Iterable[Proposal], *, source: str, extends: Sequence[str] = ()) -> str:
    """A rules file. `source`: the checkpoint; `extends`: families whose rules are right already."""
    lines = [
        f"# Proposed by `ucp patterns infer` from {_one_line(source)}.",
        "# Read it, correct it, and pass it with --patterns; nothing uses it by itself.",
        "# sure: only this fits. likely: a recorded size speaks for it. guess: only the name does. open: yours to say.",
        f'name = "{name}"',
        f'title = "proposed rules"\nextends = [{", ".join(_quoted(own) for own in extends)}]',
    ]
    for own in proposals:
        mark = "# " if own.certainty is Certainty.OPEN else ""
        pattern = own.pattern or '"..."'
        lines += [
            "",
            f"# {own.certainty}: {_one_line(own.why)} ({own.count} tensor{'s' * (own.count > 1)})",
            f"{mark}[[rule]]",
            f"{mark}name = {_quoted(own.template)}",
            f"{mark}{own.axis} = {pattern}",
        ]
    return "\n".join(lines) + "\n"


_CONTROL = re.compile(r'[\x00-\x1f\x7f"\\]')


def _quoted(text: str) -> str:
    """The text as a TOML string."""
    return '"' + _CONTROL.sub(lambda found: f"\\u{ord(found.group()):04x}", text) + '"'


def _one_line(text: str) -> str:
    return _CONTROL.sub(" ", text)
