"""Facts about the target run that every file of a destination needs: source, extras, configuration, ranks, stage.

Files are drafted (`ucp.io.torch_file.draft`) from tensors that are asked for by parameter and state.
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
from ucp.core.layout import AxisLayout, Layout, locate_shard
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
from ucp_formats.deepspeed.read.stacks import EXPERT_PATTERNS, INFO, LAYERS, ExpertStacks
from ucp_formats.deepspeed.tp.layout import TensorLayout
from ucp_formats.deepspeed.tp.universal_info import UniversalCheckpointInfo, recorded_layouts


class ParamRange(NamedTuple):
    """A range of a parameter's elements in a flat tensor of a file."""

    param: str
    """Parameter."""
    offset: int
    """Element of the file's tensor where the range starts."""
    pairs: tuple[RegionPair, ...]
    """Boxes of the global tensor that the model-parallel rank holds."""
    local_shape: tuple[int, ...]
    """Shape of the model-parallel rank's tensor."""
    start: int
    """First element, in the row-major order of that tensor."""
    stop: int
    """One past the last."""
    layout: Layout
    """How the parameter is split over the ranks."""


class AtomDraft(FileDraft):
    """Makes the tensors of one file, by parameter and state."""

    def __init__(
        self,
        path: str,
        index: Index,
        cuts: Mapping[str, TensorLayout] | None = None,
        coords: Mapping[str, int] | None = None,
        *,
        axis: str = "tp",
        known_from: str = "",
    ) -> None:
        """`index`: the source, with the shapes that this file holds.

        `cuts`: layouts of tensors that are split over the ranks of an axis; `known_from`: where these layouts come
        from. `coords`: the rank on these axes that the file is for.
        """
        super().__init__(path)
        self._index = index
        self._cuts = cuts or {}
        self._coords = coords or {}
        self._known_from = known_from
        self._full_tensors: dict[tuple[str, str, DType], NewTensor] = {}

    def full(self, param: str, state: str, dtype: DType, *, shape: tuple[int, ...] | None = None) -> NewTensor:
        """All that the rank holds of a state, as one tensor; the same object each time, so that it is stored once.

        `shape`: its shape in the file, if it is another one.
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
        """The range of each parameter in the flat tensor of data-parallel rank `rank`; `axes`: of each, in `layout`."""
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
        """How a parameter is split over its axis; then `flat` splits the rank's part in row-major order."""
        cut = self._cuts.get(param)
        known_from = "" if cut is None else cut.known_from or self._known_from
        return _one_layout(() if cut is None else (AxisLayout(cut.axis, cut.parts, cut.pattern, known_from),), flat)

    def _part(self, param: str, layout: Layout, rank: int = 0) -> LocalPart:
        """The part of a parameter that data-parallel rank `rank` holds."""
        cut = self._cuts.get(param)
        shape = self._index.atoms[param].global_shape if cut is None else cut.global_shape
        return locate_shard(layout, shape, coords={**self._coords, **{axis.axis: rank for axis in layout.flat}})


@lru_cache(maxsize=1 << 14)
def _one_layout(axes: tuple[AxisLayout, ...], flat: tuple[AxisLayout, ...]) -> Layout:
    """The layout; the same object for all ranks and states of a parameter."""
    return Layout(axes, flat)


def _pairs(part: LocalPart) -> tuple[RegionPair, ...]:
    return tuple([region.pair for region in part.regions])


EMULATED = "0.19.8"
"""Version of DeepSpeed whose files are written."""

_AS_THE_FAMILY = (
    "the run that loads the files must split parameters as this family does: DeepSpeed does not check names, so it "
    "would not notice"
)
"""Note for layouts that come from a family, not from the source's record."""
_RECORD = "universal_checkpoint_info"
_AUTOEP = {"universal_checkpoint_version", LAYERS, EXPERT_PATTERNS}
"""Its keys in a run with AutoEP, which do not say how tensor-parallel ranks split parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the planning of any file needs to know about the target run and its source."""

    index: Index
    """The source."""
    extras: CarriedExtras
    """The extras of the source."""
    config: RunConfig
    """The configuration of the source; empty if it has none."""
    precision: Precision
    """The precision of the source, and so of the target."""
    dtypes: Mapping[str, str]
    """State name to the dtype that the user asked for."""
    optimizer: OptimizerPlan
    """The optimizer of the source."""
    step_dtype: DType | None
    """How steps are written: float32: as 0-d tensors; int64: Python numbers as integers; None: as in the source."""
    unpacks_steps: bool = False
    """Whether int64 turns tensors into Python numbers too; not in native files, where any optimizer takes a tensor."""
    ranks: int
    """Data-parallel ranks of the target."""
    stage: int
    """ZeRO stage of the target."""
    rules: UniversalCheckpointInfo | None
    """How parameters are split over tensor-parallel ranks, if the source or a model family says it."""
    rules_notes: tuple[str, ...] = ()
    """Notes on the model family that the rules come from."""
    is_foreign: bool
    """Whether another framework saved the source, so that its optimizer is not in DeepSpeed's form."""
    keeps_zeros: bool = False
    """Whether the user accepts zeros for lost moments."""
    tp: int = 1
    """Tensor-parallel ranks of the target."""
    pp: int = 1
    """Pipeline stages of the target."""
    mp: int = 0
    """Model-parallel rank whose files are planned."""
    ep_rank: int = 0
    """Expert-parallel rank whose files are planned."""
    cuts: Mapping[str, TensorLayout] = field(default_factory=dict)
    """Layouts of tensors that are split over tensor-parallel ranks, over expert-parallel ones, or over data-parallel
    ones (parameters of which each trains a part)."""
    stacks: ExpertStacks = field(default_factory=ExpertStacks)
    """Experts that AutoEP stacks: as in the source, or as the target's ranks hold them."""

    def has_parts(self, param: str) -> bool:
        """Whether every data-parallel rank trains a part of a parameter."""
        return param in self.cuts and self.cuts[param].axis == "dp"

    def draft(self, path: str, rank: int = 0) -> AtomDraft:
        """A new file of model-parallel rank `mp`, expert-parallel rank `ep_rank` and data-parallel rank `rank`."""
        coords = {"tp": self.mp % self.tp, "ep": self.ep_rank, "dp": rank}
        return AtomDraft(path, self.index, self.cuts, coords, known_from=self.tp_known_from)

    @property
    def tp_known_from(self) -> str:
        """Where the tensor-parallel layouts come from."""
        return "" if self.rules is None else self.rules.known_from.get("tp", _RECORD)

    def module_dtype(self, atom: AtomIndex) -> DType:
        """Dtype of a parameter or buffer in the module."""
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
    shapes = {atom.name: atom.global_shape for atom in index.atoms.values()}
    recorded = ExpertStacks.of({INFO: extras.mapping(INFO)}, index.path)
    stacks = recorded if recorded.counts.keys() & shapes.keys() else ExpertStacks.of_names(shapes)
    precision = config.precision(atom.model_dtype or atom.states[WEIGHT].dtype for atom in trained if atom.states)
    return RunFacts(
        index=index,
        extras=extras,
        config=config,
        precision=precision,
        dtypes=options.dtypes,
        optimizer=optimizer,
        # an optimizer in DeepSpeed saved the step in the form that the same optimizer loads
        step_dtype=DType.INT64 if is_foreign else None,
        ranks=ranks,
        stage=stage,
        rules=rules,
        rules_notes=rules_notes,
        is_foreign=is_foreign,
        keeps_zeros=options.keeps_zeros,
        stacks=stacks,
    )


def is_plain_number(atom: AtomIndex, state: str) -> bool:
    """Whether a state was a Python number in the source."""
    ref = atom.states[state].fragments[0].ref
    plain = isinstance(ref, InlineTensor) and not ref.shape
    return plain and (not ref.dtype.is_floating or ref.dtype is DType.FLOAT64)


def _tensor_rules(
    index: Index, extras: CarriedExtras, options: TargetOptions, tp: int
) -> tuple[UniversalCheckpointInfo | None, tuple[str, ...]]:
    """The record of the source, or one made from a family's rules for `tp` ranks, and notes on that family.

    A family is used if there is no record, or if the user names one and the source had one tensor-parallel rank (with
    several, the source was read with that family already).
    """
    info = extras.get(_RECORD)
    stated = SourceOptions(options.family or None, Path(options.patterns) if options.patterns else None)
    record = UniversalCheckpointInfo(info, index.path) if isinstance(info, dict) and info.keys() - _AUTOEP else None
    if tp == 1 or (record is not None and (stated == SourceOptions() or index.topology.tp > 1)):
        return record, ()
    from ucp_formats.deepspeed.tp.family import FamilyRules, script_arguments  # few runs need one

    saved = extras.get("args") or extras.client_state().get("args")
    family = FamilyRules(stated, script_arguments(saved), index.path)
    shapes = {atom.name: (atom.global_shape, atom.kind is not Kind.BUFFER) for atom in index.atoms.values()}
    try:
        layouts = family.layouts_of(shapes, tp)
    except UnknownFamilyError as error:
        raise TopologyError(f"{error}\nOr write files for a run with tp=1") from None
    rules = UniversalCheckpointInfo(recorded_layouts(layouts), index.path)
    rules.known_from = family.known_from
    return rules, (*family.notes, _AS_THE_FAMILY)


def localize(atoms: Mapping[str, AtomIndex], layouts: Mapping[str, TensorLayout], rank: int) -> dict[str, AtomIndex]:
    """The atoms with the shapes that they have on `rank`; fragments still refer to the global tensors."""
    local = dict(atoms)
    for name in layouts.keys() & atoms.keys():
        atom, shape = atoms[name], layouts[name].local_shape(rank)
        states = {
            key: replace(state, global_shape=shape) if state.global_shape == atom.global_shape else state
            for key, state in atom.states.items()
        }
        local[name] = replace(atom, global_shape=shape, states=states)
    return local


def tag(index: Index) -> str:
    """Name of the tag folder: the tag of the source, or DeepSpeed's default, `global_step{N}`."""
    named = (extra.value for extra in index.extras if extra.name == TAG and isinstance(extra.value, str))
    return next(named, f"global_step{index.step or 0}")


def check_tag(index: Index, *, error: type[DestinationError] = DestinationError) -> None:
    """Raise `error` for a tag that cannot be a folder of the destination, or that looks like a file of a checkpoint."""
    name = tag(index)
    faults = []
    if not name.isprintable() or name != name.strip():
        faults.append((name, "the file `latest` cannot hold unprintable characters, or blanks at either end"))
    if any(parse_name(part) for part in name.split("/")):
        faults.append((name, "it is the name of a file of a checkpoint"))
    check_named(
        [(name, name)],
        expected="a tag that can be a folder in the destination, such as global_step100",
        remedy="choose another with --tag",
        reserved=(LATEST, LATEST_UNIVERSAL, MARK),
        faults=faults,
        error=error,
    )


class EngineTarget(Target):
    """What the two targets whose files DeepSpeed engines load have in common."""

    resumes = True
    scheduler = LR_SCHEDULER
    pointers: tuple[str, ...] = (LATEST,)
    """Files at the root that name the tag to load; the last one is the one that the run reads."""

    def takes_family(self, topology: Topology | None) -> bool:
        """Whether --family means something: only if there are several tensor-parallel ranks."""
        return topology is not None and topology.tp > 1

    def seal(self, index: Index, plan: TargetPlan, receipts: Receipts) -> tuple[OutputFile, ...]:
        """The pointer files, which make this tag the one that a run loads."""
        text = tag(index).encode()
        return tuple(
            OutputFile(path=path, nbytes=len(text), literals=(Literal(0, text),), is_pointer=True)
            for path in self.pointers
        )

    def _finish_plan(
        self, facts: RunFacts, plan: TargetPlan, zeros: Mapping[str, frozenset[str]] = MappingProxyType({})
    ) -> TargetPlan:
        """The plan, completed by casts, notes, left-out extras and the files beside the tag folder."""
        plan = replace(
            plan,
            casts=(*plan.casts, *facts.optimizer.casts),
            zeros=zeros,
            dropped=facts.extras.left_behind(),
            notes=(*facts.rules_notes, *plan.notes),
        )
        return add_sidecars(facts.index, plan, reserved=self.pointers)
