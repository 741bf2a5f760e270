"""What a user says with `--set`, held against the model and the layout that are written.

An argument that the tensors or the topology contradict is no choice: Megatron would build another model from it, or
read other rows, and nothing would tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ucp.core.dtypes import DType
from ucp.core.index import Kind
from ucp.errors import UsageError, listed
from ucp_formats.megatron.run.recorded_sizes import sizes_in_doubt
from ucp_formats.megatron.run.stages import hybrid_pattern
from ucp_formats.megatron.write.arguments.derived import LETTERS, layer_letters
from ucp_formats.megatron.write.model import Model

__all__ = ["check_asked"]

_UNTIED = "untie_embeddings_and_output_weights"
_OUTPUT = "output_layer.weight"
_HALVES = {DType.BFLOAT16: "bf16", DType.FLOAT16: "fp16"}
"""Types that a model computes in, by the argument that says so."""


def check_asked(
    asked: Mapping[str, object], model: Model, *, before: Mapping[str, object], written: Mapping[str, object]
) -> None:
    """Raise UsageError naming every value in `asked` that what is written contradicts.

    `before`: the arguments without what was asked for. `written`: those that the checkpoint will carry.
    """
    if not asked:
        return
    lines = [*_overruled(asked, written), *_facts(asked, model), *_layers(asked, model), *_types(asked, model)]
    shapes = {own.name: own.shape for own in model.tensors}
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
