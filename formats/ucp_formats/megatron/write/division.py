"""What the degrees of a run have to divide: a layout that Megatron would not start at is refused, with every reason.

The rules are megatron-core's own (0.13 to 0.19): TransformerConfig.__post_init__ for heads, groups and layers, MoELayer
for experts, MambaMixer for its heads and groups, and `divide` in column- and row-parallel layers for everything else.
The vocabulary is apart: `torch_dist` is loaded at any number of padded rows (`allow_shape_mismatch`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ucp.core.layout import place
from ucp.core.topology import Topology
from ucp.errors import TopologyError, listed
from ucp_formats.megatron.run.stages import stage_problem
from ucp_formats.megatron.write.model import Model, ModelTensor
from ucp_formats.megatron.write.run import TargetRun, grid_problem

__all__ = ["check_division", "vocabulary_notes"]

_EMBEDDING = "embedding.word_embeddings.weight"
_MAMBA = ".mixer.A_log"
_MOST_KINDS = 4
"""Kinds of tensors that are named in one line."""


def check_division(run: TargetRun) -> None:
    """Prove that a run of this layout can hold the model. Raises TopologyError with all that speaks against it."""
    own, arguments, model = run.topology, run.arguments, run.model
    problems = grid_problem(own), stage_problem(model.layers, pp=own.pp, vpp=own.vpp, arguments=arguments)
    found = [
        *filter(None, problems[:1]),
        *_attention_problems(own.tp, arguments),
        *_mamba_problems(own.tp, arguments, model),
        *_cut_problems(model, own),
        *_vocabulary_problems(run),
        *_expert_problems(model, own.ep),
        *filter(None, problems[1:]),
    ]
    if found:
        raise TopologyError(
            f"expected a layout that divides the model into equal parts, as Megatron does; got {own} for "
            f"{run.index.path}:\n{listed(found, most=40)}\nChoose other degrees"
        )


def _number(arguments: Mapping[str, object], name: str) -> int:
    """A whole number; 0 where the arguments have none."""
    value = arguments.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _groups(arguments: Mapping[str, object]) -> int:
    """Groups of heads that share keys and values: as many as heads, unless grouped; 0 if not known."""
    grouped = arguments.get("group_query_attention", True)
    return (_number(arguments, "num_query_groups") if grouped else 0) or _number(arguments, "num_attention_heads")


def _attention_problems(tp: int, arguments: Mapping[str, object]) -> Iterator[str]:
    heads, groups = _number(arguments, "num_attention_heads"), _groups(arguments)
    if heads % tp:
        yield f"heads: tp={tp} does not divide num_attention_heads={heads}"
    if groups and groups != heads and groups % tp and tp % groups:
        yield f"groups of queries: num_query_groups={groups} is neither a multiple nor a divisor of tp={tp}"


def _mamba_problems(tp: int, arguments: Mapping[str, object], model: Model) -> Iterator[str]:
    heads = next((own.shape[0] for own in model.tensors if own.name.endswith(_MAMBA)), 0)
    groups = _number(arguments, "mamba_num_groups")
    if heads % tp:
        yield f"heads of Mamba: tp={tp} does not divide {heads}"
    if heads and groups % tp:
        yield f"groups of Mamba: tp={tp} does not divide mamba_num_groups={groups}"


def _cut_problems(model: Model, own: Topology) -> Iterator[str]:
    """Dims that are cut into parts of other lengths: a line per axis, every kind of tensor once."""
    degrees = {"tp": own.tp, "etp": own.expert_tp}
    seen: dict[str, dict[str, None]] = {}
    kinds: dict[tuple[str, tuple[int, ...]], ModelTensor] = {}
    for tensor in model.tensors:
        kinds.setdefault((tensor.match.rule.name.text, tensor.shape), tensor)
    for (name, shape), tensor in kinds.items():
        if tensor.match.rule.padded is None:
            for axis in _uneven_axes(tensor, degrees):
                seen.setdefault(axis, {})[f"{name} {list(shape)}"] = None
    for axis, uneven in seen.items():
        shown = ", ".join(list(uneven)[:_MOST_KINDS])
        more = f" and {len(uneven) - _MOST_KINDS} more like it" if len(uneven) > _MOST_KINDS else ""
        yield f"dims: {axis}={degrees[axis]} does not divide {shown}{more}"


def _uneven_axes(tensor: ModelTensor, degrees: Mapping[str, int]) -> Iterator[str]:
    """Axes whose first and last rank hold boxes of other sizes."""
    layout = tensor.match.layout(axes=degrees, global_shape=tensor.shape)
    first = {axis.axis: 0 for axis in layout.axes}
    wanted = [piece.box.sizes for piece in place(layout, tensor.shape, coords=first)]
    for axis in layout.axes:
        coords = {**first, axis.axis: axis.parts - 1}
        if [piece.box.sizes for piece in place(layout, tensor.shape, coords=coords)] != wanted:
            yield axis.axis


def _expert_problems(model: Model, ep: int) -> Iterator[str]:
    if ep > 1 and not model.experts:
        yield f"experts: ep={ep}, and the model has none"
    elif model.experts % ep:
        yield f"experts: ep={ep} does not divide {model.experts}"


def _rows(model: Model) -> int:
    """Rows of the embedding, padding counted; 0 without one."""
    return next((own.shape[0] for own in model.tensors if own.name == _EMBEDDING), 0)


def _padded(run: TargetRun) -> int:
    """Rows of the embedding in the run."""
    return _number(run.arguments, "padded_vocab_size") or _rows(run.model)


def _vocabulary_problems(run: TargetRun) -> Iterator[str]:
    tp, rows, padded = run.topology.tp, _rows(run.model), _padded(run)
    elsewhere = "torch_dist (--layout torch_dist) can be loaded with other padding"
    if rows and padded != rows and run.is_legacy:
        yield f"vocabulary: padded_vocab_size={padded}, and there are {rows} rows; {elsewhere}"
    elif padded % tp:
        multiple = max(_number(run.arguments, "make_vocab_size_divisible_by"), 1) * tp
        next_one = -(-padded // multiple) * multiple
        given = f"say what the run pads to, as in --set padded_vocab_size={next_one}"
        remedy = elsewhere if run.is_legacy else given
        yield f"vocabulary: tp={tp} does not divide padded_vocab_size={padded}; {remedy}"


def vocabulary_notes(run: TargetRun) -> Iterator[str]:
    """What a run makes of the rows of the vocabulary, without a word."""
    tp, rows, padded = run.topology.tp, _rows(run.model), _padded(run)
    if not rows:
        return
    if padded != rows:
        what = (
            f"fills rows {rows} to {padded - 1} with zeros" if padded > rows else f"drops rows {padded} to {rows - 1}"
        )
        yield f"the vocabulary has {rows} rows here and {padded} in the run: Megatron {what}, in every state"
        return
    multiple = _number(run.arguments, "make_vocab_size_divisible_by") * tp
    if multiple and rows % multiple:
        otherwise = "Megatron does not load it" if run.is_legacy else "it adds rows of zeros, or drops the last"
        yield (
            f"the vocabulary is padded to {rows} rows, a run of tp={tp} pads to a multiple of {multiple}: start it "
            f"with --make-vocab-size-divisible-by {rows // tp}, or {otherwise}"
        )
