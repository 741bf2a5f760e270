"""`universal_checkpoint_info`: which pattern each parameter has over the tensor-parallel ranks.

The record lists regular expressions on parameter names by category. The category whose expression matches decides, as
in DeepSpeed's converter (`merge_tp_slices`, checkpoint/ds_to_universal.py, 0.19.8):

| category | pattern |
|---|---|
| `affine_map` | the pieces that it lists for each rank |
| `tp_replicated_parameter_patterns` | replicate |
| `parameter_to_average_patterns` | partial |
| `parameter_with_2_sub_params_cat_dim_0` | shard of dim 0, two equal blocks |
| `parameter_with_sub_params` | shard or cut of its `partition_dim`, a block per sub-parameter |
| `parameter_with_row_parallelism_patterns` | shard of dim 1 |
| none | shard of dim 0 |

If two categories match a name and there is no `affine_map` for it, DeepSpeed's converter takes the first; here that is
an error, unless both mean the same split. `vocabulary_parameter_patterns` name embeddings whose padding DeepSpeed cuts
off; here the padded tensor is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ucp.core.layout import Overlap
from ucp.errors import MalformedError, UnsupportedError, format_count, format_list
from ucp.io.pickle.fields import Shape, format_value, require_integer, require_mapping, require_sequence, text
from ucp.io.pickle.values import GlobalName, Stub
from ucp_formats.deepspeed.read.stacks import EXPERT_PATTERNS, LAYERS
from ucp_formats.deepspeed.tp.layout import (
    AFFINE_VERSION,
    MisfitError,
    RefusedError,
    TensorLayout,
    TensorShapes,
    affine_layout,
    cut_layout,
    equal_layout,
    even_parts,
)

_KNOWN_VERSION = 0.4
"""Latest supported `universal_checkpoint_version`."""

_REPLICATED = "tp_replicated_parameter_patterns"
_AVERAGED = "parameter_to_average_patterns"
_TWO = "parameter_with_2_sub_params_cat_dim_0"
_SUB = "parameter_with_sub_params"
_ROW = "parameter_with_row_parallelism_patterns"
_CATEGORIES = (_REPLICATED, _AVERAGED, _TWO, _ROW)
_VOCABULARY = "vocabulary_parameter_patterns"
_WIDTHS = "sub_param_shard_widths"
_UNSUPPORTED = "autotp_unsupported_parameter_patterns"
_AFFINE = "affine_map"


class _Patterns:
    r"""Regular expressions; one for a single full name (`^a\.b$`, as AutoTP writes) is looked up, not searched for."""

    def __init__(self, patterns: Iterable[object], where: str) -> None:
        self._literal: dict[str, str] = {}
        self._others: list[tuple[str, re.Pattern[str]]] = []
        for item in patterns:
            pattern = text(item, where)
            name = re.sub(r"\\(.)", r"\1", pattern[1:-1])
            if pattern == f"^{re.escape(name)}$":
                self._literal[name] = pattern
                continue
            try:
                self._others.append((pattern, re.compile(pattern)))
            except re.error as error:
                raise MalformedError(f"expected regular expressions in {where}; got {pattern!r}: {error}") from None

    def matching(self, name: str) -> list[str]:
        """The expressions that match `name` from its start, as `re.match` does."""
        literal = [self._literal[name]] if name in self._literal else []
        return literal + [pattern for pattern, form in self._others if form.match(name)]


class UniversalCheckpointInfo:
    """The record of one checkpoint; `where`: for messages."""

    notes: tuple[str, ...] = ()
    """Notes on assumptions: none, because the layouts are recorded."""
    known_from: Mapping[str, str] = MappingProxyType({})
    """Axis to where its layouts are known from, if not from the record: here always empty."""

    def __init__(self, info: Mapping[object, object], where: str) -> None:
        self._info = info
        self._where = where
        version = info.get("universal_checkpoint_version", 0.0)
        self._version = float(version) if isinstance(version, int | float) else 0.0
        if self._version > _KNOWN_VERSION:
            raise UnsupportedError(
                f"expected universal_checkpoint_version up to {_KNOWN_VERSION} in {where}; got {self._version}. This "
                "ucp does not know its layouts: save with an older DeepSpeed, or use a newer ucp"
            )
        lists: dict[str, Sequence[object]] = {
            key: [] if info.get(key) is None else require_sequence(info[key], f"{key} of {where}")
            for key in (*_CATEGORIES, _VOCABULARY, _SUB)
        }
        self._categories = {key: _Patterns(lists[key], f"{key} of {where}") for key in _CATEGORIES}
        self._vocabulary = _Patterns(lists[_VOCABULARY], f"{_VOCABULARY} of {where}")
        subs = (_SubParams.of(item, where) for item in lists[_SUB])
        self._subs = [(sub, _Patterns(sub.patterns, f"{_SUB} of {where}")) for sub in subs]
        widths = info.get(_WIDTHS)
        self._widths = {
            text(pattern, _WIDTHS): [
                [require_integer(n, _WIDTHS) for n in require_sequence(b, _WIDTHS)]
                for b in require_sequence(blocks, _WIDTHS)
            ]
            for pattern, blocks in (widths.items() if isinstance(widths, dict) else ())
        }
        affine = require_mapping(info.get(_AFFINE) or {}, f"{_AFFINE} of {where}")
        if affine.get("version", AFFINE_VERSION) != AFFINE_VERSION:
            raise UnsupportedError(
                f"expected affine_map of version {AFFINE_VERSION} in {where}; got {format_value(affine['version'])}. "
                "Use a newer ucp"
            )
        self._affine = require_mapping(affine.get("params", {}), f"{_AFFINE} of {where}")
        self._affine_patterns = _Patterns(self._affine, f"{_AFFINE} of {where}")
        unsupported = info.get(_UNSUPPORTED)
        self._unsupported = unsupported if isinstance(unsupported, dict) else {}
        self._unsupported_patterns = _Patterns(self._unsupported, f"{_UNSUPPORTED} of {where}")

    def layouts(self, tensors: Mapping[str, TensorShapes]) -> dict[str, TensorLayout]:
        """Layout of every tensor. Raises UnsupportedError or MalformedError, listing every tensor that it is about."""
        layouts: dict[str, TensorLayout] = {}
        wrong: list[str] = []
        unsupported: list[str] = []
        for name, shapes in tensors.items():
            try:
                layouts[name] = self._layout(name, shapes)
            except RefusedError as error:
                unsupported.append(f"{name}: {error}")
            except MisfitError as error:
                wrong.append(f"{name}: {error}")
        if unsupported:
            raise UnsupportedError(
                f"{self._where} records layouts over the tensor-parallel ranks from which the global tensors cannot "
                f"be restored bit for bit:\n{format_list(unsupported)}\nResume in DeepSpeed with tensor-parallel "
                "degree 1 and save again"
            )
        if wrong:
            raise MalformedError(
                f"universal_checkpoint_info of {self._where} does not fit {format_count(len(wrong), 'parameter')}:\n"
                f"{format_list(wrong)}\nThe record is from another model, or contradicts itself: correct the patterns "
                "that universal_checkpoint_info() of the model returns, and save again"
            )
        return layouts

    def layouts_of(self, tensors: Mapping[str, tuple[Shape, bool]], parts: int) -> dict[str, TensorLayout]:
        """Layout of global tensors over `parts` ranks; `tensors`: name to shape, and whether it is split by default.

        Raises TopologyError, UnsupportedError or MalformedError, listing every tensor that the error is about.
        """
        rules = UniversalCheckpointInfo(self.for_degree(parts), self._where)
        recorded = {name: self._recorded_layout(name, shape, parts) for name, (shape, _) in tensors.items()}
        known = {name: layout for name, layout in recorded.items() if layout is not None}
        rest = {name: entry for name, entry in tensors.items() if name not in known}
        dims = {name: (shape, self._cut_dim(name, declared=declared)) for name, (shape, declared) in rest.items()}
        local = even_parts(dims, parts)
        shapes = {
            name: TensorShapes(local=local_shapes, declared=rest[name][1]) for name, local_shapes in local.items()
        }
        return {**known, **rules.layouts(shapes)}

    def _recorded_layout(self, name: str, shape: Shape, parts: int) -> TensorLayout | None:
        """The layout over exactly `parts` ranks that the record spells out for a tensor of this shape; None if none."""
        where = f"{_AFFINE} of {name}"
        for pattern in self._affine_patterns.matching(name):
            ranks = require_mapping(self._affine[pattern], where).get("ranks")
            if isinstance(ranks, dict) and len(ranks) == parts:
                local = [require_mapping(ranks[rank], where).get("shard_shape") for rank in sorted(ranks)]
                sizes = [
                    tuple(require_integer(n, name) for n in require_sequence(shard_shape, name))
                    for shard_shape in local
                ]
                layout = affine_layout(self._affine[pattern], sizes, where)
                return layout if layout.global_shape == shape else None
        for sub, pattern in self._subs_of(name):
            widths = self._widths.get(pattern)
            if widths is not None and all(len(block) == parts for block in widths):
                lengths = [sum(block) for block in zip(*widths, strict=True)]
                cut = [(*shape[: sub.dim], length, *shape[sub.dim + 1 :]) for length in lengths]
                return cut_layout(sub.dim, cut, widths) if sum(lengths) == shape[sub.dim] else None
        return None

    def for_degree(self, parts: int) -> dict[object, object]:
        """The record for another number of ranks: without maps and widths, which hold for one number of ranks only."""
        left_out = (_AFFINE, _WIDTHS, LAYERS, EXPERT_PATTERNS)  # the last two are those of the source's stacks
        info = {key: value for key, value in self._info.items() if key not in left_out}
        saved = self._info.get(_WIDTHS)
        if isinstance(saved, dict):
            widths: dict[object, object] = dict(saved)
            for pattern, blocks in self._widths.items():  # equal widths stay equal over the new number of ranks
                totals = [sum(block) for block in blocks]
                if all(len(set(block)) == 1 for block in blocks) and all(total % parts == 0 for total in totals):
                    widths[pattern] = [[total // parts] * parts for total in totals]
            info[_WIDTHS] = widths
        return info

    def _subs_of(self, name: str) -> list[tuple[_SubParams, str]]:
        """Entries of `parameter_with_sub_params` that match a tensor, each with the pattern that matches."""
        return [(sub, pattern) for sub, patterns in self._subs for pattern in patterns.matching(name)]

    def _match_categories(self, name: str) -> dict[str, list[str]]:
        """Categories that match a tensor, each with the patterns that match."""
        return {key: matching for key, patterns in self._categories.items() if (matching := patterns.matching(name))}

    def _cut_dim(self, name: str, *, declared: bool) -> int | None:
        """Dim along which a tensor is split, by its categories; None if all ranks hold it in full."""
        matched = self._match_categories(name).keys()
        if matched & {_REPLICATED, _AVERAGED}:
            return None
        for sub, _ in self._subs_of(name):
            return sub.dim
        return 1 if _ROW in matched else 0 if _TWO in matched or declared else None

    def file_keys(self, name: str) -> dict[str, object]:
        """Keys beside the tensor in a universal checkpoint, by which DeepSpeed splits it (`merge_tp_slices`)."""
        matched = self._match_categories(name).keys()
        is_whole = bool(matched & {_REPLICATED, _AVERAGED})
        subs = self._subs_of(name)
        keys: dict[str, object] = {}
        if _TWO in matched:
            keys["param_n_sub_params"] = 2
        elif subs and not is_whole:
            keys["sub_param_shape"] = subs[0][0].saved
        keys["cat_dim"] = 1 if _ROW in matched and not is_whole else 0
        if self._vocabulary.matching(name):
            keys["vocab_tensor"] = True
        return keys

    def padded_vocabulary(self, name: str, global_shape: Shape) -> int | None:
        """Number of rows that are not padding, if `name` is an embedding with padding; else None."""
        size = self._info.get("original_vocab_size")
        if not isinstance(size, int) or not self._vocabulary.matching(name):
            return None
        return size if global_shape and size < global_shape[0] else None

    def _layout(self, name: str, shapes: TensorShapes) -> TensorLayout:
        for pattern in self._unsupported_patterns.matching(name):
            raise RefusedError(str(self._unsupported[pattern]))
        affine = self._affine_patterns.matching(name)
        if len(affine) > 1:
            raise MisfitError(f"several patterns of {_AFFINE} match it: {affine}")
        if affine:
            return affine_layout(self._affine[affine[0]], shapes.local, f"{_AFFINE} of {name}")
        matched = self._match_categories(name)
        subs = self._subs_of(name)
        patterns_by_category = {**matched, _SUB: [pattern for _, pattern in subs]} if subs else matched
        if len(patterns_by_category) > 1 and not (
            patterns_by_category.keys() == {_SUB, _ROW} and all(sub.dim == 1 for sub, _ in subs)
        ):
            categories = [f"{key} ({', '.join(map(repr, patterns))})" for key, patterns in patterns_by_category.items()]
            raise MisfitError(f"the patterns contradict one another: it is matched by {' and '.join(categories)}")
        if len(specs := {(sub.dim, sub.spec) for sub, _ in subs}) > 1:
            twice = sorted(map(str, specs))
            raise MisfitError(f"the patterns contradict one another: {_SUB} lists it with several splits: {twice}")
        if _AVERAGED in matched:
            return equal_layout("partial", shapes.local)
        if _REPLICATED in matched or not (matched or subs or shapes.declared):
            return equal_layout("replicate", shapes.local)
        if _TWO in matched:
            if any(not shape or shape[0] % 2 for shape in shapes.local):
                shown_shapes = [list(shape) for shape in shapes.local]
                raise MisfitError(f"expected dim 0 to be two equal blocks on each rank; got shapes {shown_shapes}")
            return cut_layout(0, shapes.local, [[shape[0] // 2 for shape in shapes.local]] * 2)
        if subs:
            return cut_layout(subs[0][0].dim, shapes.local, self._blocks(*subs[0], shapes.local))
        return cut_layout(1 if _ROW in matched else 0, shapes.local, None)

    def _blocks(self, sub: _SubParams, pattern: str, shapes: Sequence[Shape]) -> Sequence[Sequence[int]]:
        """Elements of every sub-parameter on every rank."""
        if pattern in self._widths:
            return self._widths[pattern]
        if self._version >= 0.4:  # this version records the widths; without them the split need not be even
            raise MisfitError(f"expected widths of its sub-parameters under {pattern!r} in {_WIDTHS}; got none")
        if any(sub.dim >= len(shape) for shape in shapes):
            raise MisfitError(f"expected tensors with a dim {sub.dim}; got {[list(shape) for shape in shapes]}")
        total = sum(shape[sub.dim] for shape in shapes)
        sizes = sub.spec if isinstance(sub.spec, tuple) else (total // max(sub.spec, 1),) * sub.spec
        if sum(sizes) != total:
            how = f"of {list(sizes)} elements" if isinstance(sub.spec, tuple) else f"that are {sub.spec} equal ones"
            raise MisfitError(f"sub-parameters {how} do not add up to {total}")
        for size in sizes:
            if size % len(shapes):
                raise MisfitError(f"{len(shapes)} ranks do not divide a sub-parameter of {size} elements")
        return [[size // len(shapes)] * len(shapes) for size in sizes]


def recorded_layouts(layouts: Mapping[str, TensorLayout]) -> dict[object, object]:
    """A `universal_checkpoint_info` that records these layouts, with one pattern per name. Raises UnsupportedError."""
    info: dict[object, object] = {"universal_checkpoint_version": _KNOWN_VERSION, _VOCABULARY: []}
    replicated: list[str] = []
    averaged: list[str] = []
    rows: list[str] = []
    subs: list[dict[str, object]] = []
    widths: dict[str, object] = {}
    for name, layout in layouts.items():
        pattern = f"^{re.escape(name)}$"
        try:
            blocks = layout.block_widths()
        except MisfitError as error:
            raise UnsupportedError(
                f"{name}: universal_checkpoint_info cannot record how it is split: {error}"
            ) from error
        if blocks is None:
            (averaged if layout.overlap is Overlap.MEAN else replicated).append(pattern)
            continue
        dim, lengths = blocks
        if len(lengths) > 1 or len(set(lengths[0])) > 1:
            shape = [tuple(map(sum, lengths)) if at == dim else n for at, n in enumerate(layout.global_shape)]
            subs.append({"patterns": [pattern], "shape": tuple(shape), "partition_dim": dim})
            widths[pattern] = [list(block) for block in lengths]
        elif dim == 1:
            rows.append(pattern)
        elif dim:
            raise UnsupportedError(f"{name}: DeepSpeed splits tensors along dim 0 or 1; got dim {dim}")
    return {**info, _REPLICATED: replicated, _AVERAGED: averaged, _ROW: rows, _SUB: subs, _WIDTHS: widths}


@dataclass(frozen=True, slots=True, kw_only=True)
class _SubParams:
    """An entry of `parameter_with_sub_params` (`SubparamShape`, checkpoint/universal_checkpoint.py)."""

    patterns: tuple[str, ...]
    """Regular expressions on the names that it applies to."""
    dim: int
    """Dim that is split."""
    spec: int | tuple[int, ...]
    """Sizes of the sub-parameters along that dim, or the number of sub-parameters if they are equal."""
    shape: tuple[object, ...]
    """Shape as recorded."""

    @property
    def saved(self) -> Stub:
        """The object that DeepSpeed's loader reads."""
        made_by = GlobalName("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
        state = {"patterns": list(self.patterns), "shape": self.shape, "partition_dim": self.dim}
        return Stub(made_by, state=state, has_state=True)

    @classmethod
    def of(cls, saved: object, where: str) -> _SubParams:
        get = saved.attribute if isinstance(saved, Stub) else require_mapping(saved, f"{_SUB} of {where}").get
        where = f"an entry of {_SUB} of {where}"
        dim = require_integer(get("partition_dim"), where)
        shape = require_sequence(get("shape"), where)
        if not 0 <= dim < len(shape):
            raise MalformedError(f"expected partition_dim to be a dim of {list(shape)} in {where}; got {dim}")
        size = shape[dim]
        spec = (
            require_integer(size, where)
            if isinstance(size, int)
            else tuple(require_integer(n, where) for n in require_sequence(size, where))
        )
        patterns = tuple(text(p, where) for p in require_sequence(get("patterns"), where))
        return cls(patterns=patterns, dim=dim, spec=spec, shape=tuple(shape))
