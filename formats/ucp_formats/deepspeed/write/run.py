"""Facts of the run that every file of a destination needs: source, extras, configuration, ranks and stage.

A file is drafted (`ucp.io.torch_file.draft`) from tensors that are named by parameter and state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ucp.contract.layouts import FlatLayout
from ucp.contract.optimizer import OptimizerPlan
from ucp.contract.output_names import check_named
from ucp.contract.protocols import SourceOptions, Target
from ucp.contract.run_extras import LR_SCHEDULER
from ucp.contract.sidecars import add_sidecars
from ucp.core.gaps import check_weights
from ucp.core.index import TAG, WEIGHT, AtomIndex, Index, Kind
from ucp.core.layout import AxisLayout, Layout, Pattern, locate_shard
from ucp.core.layout import RankShard as LocalPart
from ucp.core.region import RegionPair
from ucp.core.target import Literal, OutputFile, Receipts, Slice, TargetOptions, TargetPlan, full_slice
from ucp.core.tensor import DType, InlineTensor
from ucp.core.topology import Topology
from ucp.errors import DestinationError, TagError, TopologyError, UnknownFamilyError, UsageError
from ucp.io.folder import MARK
from ucp.io.torch_file.draft import FileDraft, Part
from ucp.io.torch_file.storage import NewTensor
from ucp.transfer.probe import Prober
from ucp_formats.deepspeed.config import Precision, RunConfig
from ucp_formats.deepspeed.extras import CarriedExtras
from ucp_formats.deepspeed.names import LATEST, LATEST_UNIVERSAL, parse_name
from ucp_formats.deepspeed.tp.layout import TensorLayout
from ucp_formats.deepspeed.tp.universal_info import UniversalCheckpointInfo, recorded_layouts


class ParamRange(NamedTuple):
    """A range of a parameter in a tensor of a file."""

    param: str
    """Parameter."""
    offset: int
    """Element of the file's tensor where the range starts."""
    pairs: tuple[RegionPair, ...]
    """Boxes of the global tensor that the model-parallel rank has."""
    local_shape: tuple[int, ...]
    """Shape of the model-parallel rank's tensor."""
    start: int
    """First element, in the row-major order of that tensor."""
    stop: int
    """One past the last."""
    layout: Layout
    """How the parameter is split over the ranks."""


class AtomDraft(FileDraft):
    """Hands out the tensors of one file, by parameter and state."""

    def __init__(
        self,
        path: str,
        index: Index,
        cuts: Mapping[str, TensorLayout] | None = None,
        tp: int = 0,
        *,
        known_from: str = "",
    ) -> None:
        """`index`: with the shapes in this file. `cuts`: layouts of tensors that are split over tensor-parallel ranks.

        `tp`: the rank among these. `known_from`: the source of `cuts`.
        """
        super().__init__(path)
        self._index = index
        self._cuts = cuts or {}
        self._tp = tp
        self._known_from = known_from
        self._full_tensors: dict[tuple[str, str, DType], NewTensor] = {}

    def full(self, param: str, state: str, dtype: DType, *, shape: tuple[int, ...] | None = None) -> NewTensor:
        """The rank's full tensor of a state; the same object each time, so that it is stored once.

        `shape`: its shape in the file, where that differs.
        """
        key = (param, state, dtype)
        if key not in self._full_tensors:
            source = self._index.atoms[param].states[state]
            atom_slice = full_slice(param, state, source, dtype=dtype)
            layout = None
            if param in self._cuts and source.global_shape == self._index.atoms[param].global_shape:
                layout = self._layout(param)
                atom_slice = replace(atom_slice, pairs=_pairs(self._part(param, layout)))
            shape = source.global_shape if shape is None else shape
            self._full_tensors[key] = self.add_tensor(dtype, shape, [Part(offset=0, slice=atom_slice, layout=layout)])
        return self._full_tensors[key]

    def ranges(self, layout: FlatLayout, axes: Mapping[str, AxisLayout], rank: int) -> list[ParamRange]:
        """The range of each parameter in the flat tensor of data-parallel rank `rank`; `axes`: those of `layout`."""
        ranges = []
        for param, (start, _) in layout.spans(rank).items():
            placement = self._layout(param, axes[param])
            part = self._part(param, placement, rank)
            pairs = _pairs(part)
            for region in part.flat or ():
                (at,), (first,), (numel,) = (
                    region.pair.local.offsets,
                    region.pair.global_box.offsets,
                    region.pair.global_box.sizes,
                )
                ranges.append(ParamRange(param, start + at, pairs, part.local_shape, first, first + numel, placement))
        return ranges

    def flat(self, state: str, dtype: DType, numel: int, ranges: Iterable[ParamRange]) -> NewTensor:
        """A one-dimensional tensor with these ranges; zero elsewhere, and where a parameter lacks the state."""
        atoms = self._index.atoms
        parts = [
            Part(
                offset=offset,
                slice=Slice(
                    param=param, state=state, dtype=dtype, pairs=pairs, local_shape=shape, start=start, stop=stop
                ),
                layout=layout,
            )
            for param, offset, pairs, shape, start, stop, layout in ranges
            if state in atoms[param].states
        ]
        return self.add_tensor(dtype, (numel,), parts)

    def _layout(self, param: str, *flat: AxisLayout) -> Layout:
        """How a parameter is split over the ranks; `flat` cuts the row-major order of a model-parallel rank's part."""
        cut = self._cuts.get(param)
        return _one_layout(() if cut is None else (cut.pattern, cut.parts, self._known_from), flat)

    def _part(self, param: str, layout: Layout, rank: int = 0) -> LocalPart:
        """The part of a parameter that data-parallel rank `rank` has."""
        cut = self._cuts.get(param)
        shape = self._index.atoms[param].global_shape if cut is None else cut.global_shape
        return locate_shard(layout, shape, coords={"tp": self._tp, "dp": rank})


@lru_cache(maxsize=1 << 14)
def _one_layout(cut: tuple[Pattern, int, str] | tuple[()], flat: tuple[AxisLayout, ...]) -> Layout:
    """One object for all ranks and states of a parameter."""
    return Layout((AxisLayout("tp", cut[1], cut[0], cut[2]),) if cut else (), flat)


def _pairs(part: LocalPart) -> tuple[RegionPair, ...]:
    return tuple([region.pair for region in part.regions])


EMULATED = "0.19.8"
"""Version of DeepSpeed whose files are written."""

_AS_THE_FAMILY = "the run that loads the files must split parameters as this family does: DeepSpeed compares no names"
"""Note for layouts that come from a family, not from a record of the source."""
_RECORD = "universal_checkpoint_info"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The run, as every file of it needs it."""

    index: Index
    """The source."""
    extras: CarriedExtras
    """Its extras."""
    config: RunConfig
    """Its configuration."""
    precision: Precision
    """Its precision, which the target shares."""
    dtypes: Mapping[str, str]
    """State name to the dtype asked for."""
    optimizer: OptimizerPlan
    """Its optimizer."""
    step_dtype: DType | None
    """Type that steps are written in: int64 for a Python number, else a 0-d tensor; None for that of the source."""
    unpacks_steps: bool = False
    """Whether steps that are tensors become Python numbers too; any optimizer resumes with them in native files."""
    ranks: int
    """Data-parallel ranks of the target."""
    stage: int
    """ZeRO stage of the target."""
    rules: UniversalCheckpointInfo | None
    """How parameters are split over tensor-parallel ranks, if the source or a model family says so."""
    rules_notes: tuple[str, ...] = ()
    """Notes on that family."""
    is_foreign: bool
    """Whether another framework saved the source, so that its optimizer is not in DeepSpeed's form."""
    keeps_zeros: bool = False
    """Whether lost moments become zeros."""
    tp: int = 1
    """Tensor-parallel ranks of the target."""
    pp: int = 1
    """Pipeline stages of the target."""
    mp: int = 0
    """Model-parallel rank whose files are planned."""
    cuts: Mapping[str, TensorLayout] = field(default_factory=dict)
    """Layouts of tensors that are split over tensor-parallel ranks."""

    def draft(self, path: str) -> AtomDraft:
        """A file of that rank."""
        return AtomDraft(path, self.index, self.cuts, self.mp % self.tp, known_from=self.tp_known_from)

    @property
    def tp_known_from(self) -> str:
        """The source of the tensor-parallel layouts."""
        return "" if self.rules is None else self.rules.known_from.get("tp", _RECORD)

    def module_dtype(self, atom: AtomIndex) -> DType:
        """Type of a parameter or buffer in the module."""
        return atom.model_dtype or atom.dtype_of(WEIGHT, self.dtypes)


def run_facts(index: Index, options: TargetOptions, *, ranks: int, stage: int, tp: int) -> RunFacts:
    """Facts of a run of `ranks` data-parallel and `tp` tensor-parallel ranks under ZeRO `stage`, from the source.

    Raises TopologyError and FamilyError if neither the source nor a family says how `tp` ranks split parameters.
    """
    if options.compress:
        raise UsageError("DeepSpeed's files are not compressed; drop --compress")
    check_weights(index)
    check_tag(index, error=TagError if options.tag else DestinationError)
    extras = CarriedExtras(index, ranks=ranks, stage=stage)
    config = RunConfig(extras.mapping("ds_config"))
    rules, rules_notes = _tensor_rules(index, extras, options, tp)
    is_foreign = not any(extra.name == "engine" for extra in index.extras)
    trained = [atom for atom in index.atoms.values() if atom.kind is Kind.PARAMETER]
    with Prober() as prober:
        optimizer = OptimizerPlan(index, prober)
    precision = config.precision(atom.model_dtype or atom.states[WEIGHT].dtype for atom in trained if atom.states)
    return RunFacts(
        index=index,
        extras=extras,
        config=config,
        precision=precision,
        dtypes=options.dtypes,
        optimizer=optimizer,
        # what an optimizer of DeepSpeed saved is for the same one
        step_dtype=DType.INT64 if is_foreign else None,
        ranks=ranks,
        stage=stage,
        rules=rules,
        rules_notes=rules_notes,
        is_foreign=is_foreign,
        keeps_zeros=options.keeps_zeros,
    )


def is_plain_number(atom: AtomIndex, state: str) -> bool:
    """Whether a state was a Python number in the source."""
    ref = atom.states[state].fragments[0].ref
    plain = isinstance(ref, InlineTensor) and not ref.shape
    return plain and (not ref.dtype.is_floating or ref.dtype is DType.FLOAT64)


def _tensor_rules(
    index: Index, extras: CarriedExtras, options: TargetOptions, tp: int
) -> tuple[UniversalCheckpointInfo | None, tuple[str, ...]]:
    """The record of the source, else one made from a family's rules for `tp` ranks, with notes on the family.

    A family that the user names overrides the record, unless the source was read with that family.
    """
    info = extras.get(_RECORD)
    stated = SourceOptions(options.family or None, Path(options.patterns) if options.patterns else None)
    record = UniversalCheckpointInfo(info, index.path) if isinstance(info, dict) else None
    if tp == 1 or (record is not None and (stated == SourceOptions() or index.topology.tp > 1)):
        return record, ()
    from ucp_formats.deepspeed.tp.family import FamilyRules, script_arguments  # few runs need one

    saved = extras.get("args") or extras.client_state().get("args")
    family = FamilyRules(stated, script_arguments(saved), index.path)
    shapes = {atom.name: (atom.global_shape, atom.kind is not Kind.BUFFER) for atom in index.atoms.values()}
    try:
        layouts = family.layouts_of(shapes, tp)
    except UnknownFamilyError as error:
        raise TopologyError(f"{error}\nOr write files for tp=1") from None
    rules = UniversalCheckpointInfo(recorded_layouts(layouts), index.path)
    rules.known_from = family.known_from
    return rules, (*family.notes, _AS_THE_FAMILY)


def tag(index: Index) -> str:
    """Name of the tag folder: the tag of the source, or `global_step{N}`, as DeepSpeed names it."""
    named = (extra.value for extra in index.extras if extra.name == TAG and isinstance(extra.value, str))
    return next(named, f"global_step{index.step or 0}")


def check_tag(index: Index, *, error: type[DestinationError] = DestinationError) -> None:
    """Raise `error` for a tag that cannot be a folder of the destination, or is named like a file."""
    name = tag(index)
    faults = []
    if not name.isprintable() or name != name.strip():
        faults.append((name, "unprintable characters, and blanks at its ends, are lost in the file that names it"))
    if any(parse_name(part) for part in name.split("/")):
        faults.append((name, "files of a checkpoint are named so"))
    check_named(
        [(name, name)],
        expected="a tag that can be a folder in the destination, such as global_step100",
        remedy="choose another with --tag",
        reserved=(LATEST, LATEST_UNIVERSAL, MARK),
        faults=faults,
        error=error,
    )


class EngineTarget(Target):
    """What both targets have in common: DeepSpeed engines load their files."""

    resumes = True
    scheduler = LR_SCHEDULER
    pointers: tuple[str, ...] = (LATEST,)
    """Files at the root that name the tag to load; the one that counts comes last."""

    def takes_family(self, topology: Topology | None) -> bool:
        """Whether a family is needed: for several tensor-parallel ranks."""
        return topology is not None and topology.tp > 1

    def seal(self, index: Index, plan: TargetPlan, receipts: Receipts) -> tuple[OutputFile, ...]:
        """The pointers, which make this tag the one that is loaded."""
        text = tag(index).encode()
        return tuple(
            OutputFile(path=path, nbytes=len(text), literals=(Literal(0, text),), is_pointer=True)
            for path in self.pointers
        )

    def _finish_plan(
        self, facts: RunFacts, plan: TargetPlan, zeros: Mapping[str, frozenset[str]] = MappingProxyType({})
    ) -> TargetPlan:
        """The plan, with notes on states and extras, and with the files beside the tag folder."""
        plan = replace(
            plan,
            casts=(*plan.casts, *facts.optimizer.casts),
            zeros=zeros,
            dropped=facts.extras.left_behind(),
            notes=(*facts.rules_notes, *plan.notes),
        )
        return add_sidecars(facts.index, plan, reserved=self.pointers)
