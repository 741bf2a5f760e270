"""Rows of the embeddings that Megatron adds, so that ranks divide them: transformers has the true vocabulary alone."""

from __future__ import annotations

from dataclasses import replace

from ucp.contract.model.arguments import run_arguments
from ucp.core.index import AtomIndex, Index
from ucp.core.names import WEIGHT
from ucp.core.patches import Made, patched
from ucp.errors import counted
from ucp.families.family import Family
from ucp_formats.huggingface.config import ModelConfig

__all__ = ["without_padding"]

_PADDED, _TRUE, _TOKENIZER = "padded_vocab_size", "vocab_size", "tokenizer_type"
_WITHOUT_END = "NullTokenizer"
"""The tokenizer whose `vocab_size` does not count the token that ends a text (megatron/training/tokenizer)."""


def without_padding(index: Index, family: Family | None, config: ModelConfig | None) -> Index:
    """`index` with the weights of embeddings cut to the true vocabulary, where the run padded it, and a note.

    The true one is that of `config`, where there is one, or else the run's own; where neither says it, all rows stay.
    """
    arguments = run_arguments(index)
    if family is None or _PADDED not in arguments:
        return index
    rows = arguments.get(_TRUE) if config is None else config.get(_TRUE)
    if config is None and isinstance(rows, int) and arguments.get(_TOKENIZER) == _WITHOUT_END:
        rows += 1
    padded = [name for name in index.atoms if any(rule.padded == 0 for rule in family.rules_of(name))]
    if not isinstance(rows, int):
        note = f"how many tokens there are is not recorded: {', '.join(padded)} may have rows of padding at the end"
        return replace(index, notes=(*index.notes, note))
    cut = {name: _cut(index.atoms[name], rows) for name in padded if 0 < rows < index.atoms[name].global_shape[0]}
    if not cut:
        return index
    left = counted(index.atoms[next(iter(cut))].global_shape[0] - rows, "row")
    note = f"{left} of padding left out after the {rows:,} of the vocabulary: {', '.join(cut)}"
    return replace(index, atoms={**index.atoms, **cut}, notes=(*index.notes, note))


def _cut(atom: AtomIndex, rows: int) -> AtomIndex:
    """The first `rows` rows of the weight."""
    shape = (rows, *atom.global_shape[1:])
    state = atom.states[WEIGHT]
    held = patched(state, Made.whole(atom.name, shape), {atom.name: state.fragments})
    return replace(atom, global_shape=shape, states={WEIGHT: held})
