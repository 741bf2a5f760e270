"""What every file of a destination must know of the run: source, extras, configuration, ranks and stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ucp.contract.output_names import check_named
from ucp.core.dtypes import DType
from ucp.core.index import TAG, AtomIndex, Index, Kind, check_weights
from ucp.core.names import WEIGHT
from ucp.core.region import RegionPair
from ucp.core.target import TargetOptions
from ucp.errors import DestinationError, TagError
from ucp.io.staging import MARK
from ucp_formats.deepspeed.config import Precision, RunConfig
from ucp_formats.deepspeed.names import LATEST, LATEST_UNIVERSAL, parse_name
from ucp_formats.deepspeed.tp.universal_info import UniversalCheckpointInfo
from ucp_formats.deepspeed.write.draft import AtomDraft
from ucp_formats.deepspeed.write.extras import CarriedExtras
from ucp_formats.deepspeed.write.optimizer.groups import stored_dtype

__all__ = ["EMULATED", "RunFacts", "check_tag", "run_facts", "tag"]

EMULATED = "0.19.8"
"""Version of DeepSpeed whose files are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The run as a whole, for every file of it."""

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
    ranks: int
    """Data-parallel ranks of the target."""
    stage: int
    """ZeRO stage of the target."""
    rules: UniversalCheckpointInfo | None
    """How parameters lie over tensor-parallel ranks, where the source says so."""
    keeps_zeros: bool = False
    """Whether moments that were lost are to be zero."""
    tp: int = 1
    """Tensor-parallel ranks of the target."""
    pp: int = 1
    """Pipeline stages of the target."""
    mp: int = 0
    """Model-parallel rank whose files are decided."""
    cuts: Mapping[str, tuple[RegionPair, ...]] = field(default_factory=dict)
    """Parameter to what that rank has of it, where that is not the whole."""

    def draft(self, path: str) -> AtomDraft:
        """A file of that rank."""
        return AtomDraft(path, self.index, self.cuts)

    def module_dtype(self, atom: AtomIndex) -> DType:
        """Type of a parameter or buffer in the module."""
        return atom.model_dtype or stored_dtype(atom, WEIGHT, {} if atom.kind is Kind.BUFFER else self.dtypes)


def run_facts(index: Index, options: TargetOptions, *, ranks: int, stage: int) -> RunFacts:
    """Facts of a run of `ranks` data-parallel ranks under ZeRO `stage` that continues the source."""
    check_weights(index)
    check_tag(index, error=TagError if options.tag else DestinationError)
    extras = CarriedExtras(index, ranks=ranks, stage=stage)
    config = RunConfig(extras.mapping("ds_config"))
    info = extras.get("universal_checkpoint_info")
    trained = [atom for atom in index.atoms.values() if atom.kind is Kind.PARAMETER]
    precision = config.precision(atom.model_dtype or atom.states[WEIGHT].dtype for atom in trained if atom.states)
    return RunFacts(
        index=index,
        extras=extras,
        config=config,
        precision=precision,
        dtypes=options.dtypes,
        ranks=ranks,
        stage=stage,
        rules=UniversalCheckpointInfo(info, index.path) if isinstance(info, dict) else None,
        keeps_zeros=options.keeps_zeros,
    )


def tag(index: Index) -> str:
    """Name of the folder of the checkpoint: that of the source, or by the step as DeepSpeed names it."""
    named = (extra.value for extra in index.extras if extra.name == TAG and isinstance(extra.value, str))
    return next(named, f"global_step{index.step or 0}")


def check_tag(index: Index, *, error: type[DestinationError] = DestinationError) -> None:
    """Raise `error` for a tag that can be no folder of the destination, or would be taken for another file."""
    name = tag(index)
    faults = []
    if not name.isprintable() or name != name.strip():
        faults.append((name, "what is not printable, and blanks at its ends, are lost in the file that names it"))
    if any(parse_name(part) for part in name.split("/")):
        faults.append((name, "files of a checkpoint are named so"))
    check_named(
        [(name, name)],
        expected="a tag that can be a folder in the destination, such as global_step100",
        remedy="choose another with --tag",
        taken=(LATEST, LATEST_UNIVERSAL, MARK),
        faults=faults,
        error=error,
    )
