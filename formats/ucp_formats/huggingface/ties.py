"""Tied weights: the output matrix of a language model that is its embedding.

transformers saves such a matrix once, under the name of the embedding. Older files hold it twice, and torch files under
two names of one storage. Whether it is tied says config.json; a model for which it does not say so and whose class has
an output matrix that the files lack is tied too, since transformers would else initialise it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ucp_formats.huggingface.weights import SavedTensor

__all__ = ["second_names", "tied_output"]

_OUTPUTS = ("lm_head.weight", "embed_out.weight")
_INPUTS = (".embed_tokens.weight", ".wte.weight", ".word_embeddings.weight", ".embed_in.weight")
"""Ends of the names of embeddings, below the model without its head."""
_WITH_HEAD = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of classes with an output matrix."""


def tied_output(tensors: Collection[str], config: Mapping[str, object]) -> tuple[str, str] | None:
    """The output matrix and the embedding that it is; None where the model is not tied, or not known to be.

    `tensors`: names; that of the output matrix may or may not be one of them.
    """
    inputs = [name for name in tensors if name.endswith(_INPUTS)]
    outputs = [name for name in _OUTPUTS if name in tensors]
    said = config.get("tie_word_embeddings")
    if len(inputs) != 1 or len(outputs) > 1 or said is False:
        return None
    if outputs:
        return (outputs[0], inputs[0]) if said is True else None
    classes = config.get("architectures")
    has_head = isinstance(classes, list) and any(str(own).endswith(_WITH_HEAD) for own in classes)
    return (_OUTPUTS[0], inputs[0]) if has_head else None


def second_names(tensors: Mapping[str, SavedTensor]) -> dict[str, str]:
    """Names of tensors that lie where another lies, with the name of that: torch files keep a storage once."""
    first: dict[object, str] = {}
    found: dict[str, str] = {}
    for name, own in tensors.items():
        if len(own.fragments) != 1 or not own.fragments[0].box.numel:
            continue
        other = first.setdefault(own.fragments[0].ref, name)
        if other != name:
            found[name] = other
    return found
