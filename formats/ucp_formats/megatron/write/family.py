"""The family by whose rules a model is written for Megatron; and for a model of none, what Megatron needs.

A source of another framework may be any model at all. Megatron loads what it builds itself, by names of its own, so
that only a model whose names a family translates can be written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ucp.contract.protocols import SourceOptions
from ucp.contract.registry import choose_family, library
from ucp.core.index import Index
from ucp.core.target import TargetOptions
from ucp.errors import FamilyError, UnknownFamilyError, listed
from ucp.families.family import Family

__all__ = ["target_family"]

_MOST_SHOWN = 8
"""Names of the source in a message."""


def target_family(index: Index, arguments: Mapping[str, object], options: TargetOptions) -> Family:
    """The family that `options` name, or that all evidence is for.

    Raises UnknownFamilyError or FamilyError, with names that were found and what is needed, where no family, or not the
    one that is named, knows all names of the source.
    """
    shapes = {atom.name: atom.global_shape for atom in index.atoms.values()}
    said = SourceOptions(options.family or None, Path(options.patterns) if options.patterns else None)
    try:
        family, _ = choose_family(names=shapes, shapes=shapes, arguments=arguments, options=said)
    except UnknownFamilyError as error:
        unread = min((_unread(own, shapes) for own in library().concrete()), key=len)
        if not unread:  # the question is which of those that know them all
            raise
        raise UnknownFamilyError(_refusal(index, unread, "a model family")) from error
    unread = _unread(family, shapes)
    if unread:
        raise FamilyError(_refusal(index, unread, f"the family {family.name!r}"))
    return family


def _unread(family: Family, names: Mapping[str, object]) -> list[str]:
    """Names that a family neither has a rule for nor knows to be no parameters."""
    return [name for name in names if not family.ignores(name) and not family.rules_of(name)]


def _refusal(index: Index, unread: list[str], whose: str) -> str:
    families = ", ".join(own.name for own in library().concrete())
    return (
        "expected names of a model that Megatron builds: its own (embedding.word_embeddings.weight, "
        "decoder.layers.0.self_attention.linear_qkv.weight, ...), or others that "
        f"{whose} has, such as those of Hugging Face; {len(unread)} of the {len(index.atoms)} names in {index.path} "
        f"are not among them:\n{listed(unread, most=_MOST_SHOWN)}\n"
        f"Only models of a known family can be written for Megatron: {families} (`ucp patterns show llama` prints "
        "one). If yours is of one under other names, write a rules file that extends it, with your names under "
        "[alias.huggingface], and pass it with --patterns my.toml; --family says which where several could be. Any "
        "model can be written --to deepspeed, deepspeed-universal or ucp"
    )
