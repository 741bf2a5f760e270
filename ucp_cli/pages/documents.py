"""What --json prints: one document per verb, whose keys do not change within a schema version.

Every document has `schema`, the name of the verb and a version, e.g. "ucp.inspect/1".
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from ucp.core.index import AtomIndex, Fragment, Index, SourceFile
from ucp.core.tensor import TensorRef
from ucp.core.text.overview import count_kinds, count_patterns, count_states
from ucp_cli.pages.values import describe_extra, json_value

if TYPE_CHECKING:
    from ucp.chain.delta.write import DeltaReport
    from ucp.checks.verify import DiffReport, VerifyReport
    from ucp.conversion.convert import ConvertReport
    from ucp.conversion.plan_report import PlanReport
    from ucp.core.topology import Topology
    from ucp.moe.report import ExpertsReport
    from ucp.placement.migrate import Migration
    from ucp.placement.placement import Placement
    from ucp.source.read import Survey
    from ucp.transfer.differences import Change


def index_document(index: Index, *, missing: Sequence[str], detailed: Collection[str]) -> dict[str, object]:
    """What `ucp inspect` found. `detailed`: names of the parameters whose shards are listed."""
    group_of = {name: number for number, group in enumerate(index.groups) for name in group.params}
    return {
        "schema": "ucp.inspect/1",
        **_source(index),
        "evidence": list(index.evidence),
        "kinds": {t.kind.value: {"tensors": t.tensors, "numel": t.numel} for t in count_kinds(index)},
        "nbytes": index.nbytes,
        "states": [asdict(tally) for tally in count_states(index)],
        "atoms": {name: _atom(atom, group_of.get(name), pieces=name in detailed) for name, atom in index.atoms.items()},
        "groups": [
            {"params": list(group.params), "hyper": {name: json_value(value) for name, value in group.hyper.items()}}
            for group in index.groups
        ],
        "aliases": dict(index.aliases),
        "extras": [
            {"name": extra.name, "rank": extra.rank, "what": describe_extra(extra), "value": json_value(extra.value)}
            for extra in index.extras
        ],
        "files": [_file(file) for file in index.files],
        "missing": list(missing),
        "doubts": [asdict(problem) for problem in index.doubts],
        "notes": list(index.notes),
        "dropped": list(index.dropped),
    }


def experts_document(report: ExpertsReport) -> dict[str, object]:
    """What `ucp inspect --experts` found."""
    layers = [
        {
            **asdict(layer),
            "experts": [
                {name: json_value(value) for name, value in asdict(expert).items()} for expert in layer.experts
            ],
        }
        for layer in report.layers
    ]
    return {"schema": "ucp.experts/1", **asdict(report), "layers": layers}


def placement_document(placement: Placement, migration: Migration | None) -> dict[str, object]:
    """What `ucp place` chose, and what moves."""
    layers = {
        str(layer): {
            "experts": list(experts),
            "balance": placement.balance(layer),
            "survival": placement.survival(layer),
        }
        for layer, experts in placement.layers.items()
    }
    document: dict[str, object] = {
        "schema": "ucp.place/1",
        "cluster": asdict(placement.cluster),
        "threshold": placement.threshold,
        "survival": placement.survival(),
        "layers": layers,
        "notes": list(placement.notes),
    }
    if migration is None:
        return document
    moved = {
        "nodes": migration.nodes,
        "transfers": [asdict(transfer) for transfer in migration.transfers],
        "nbytes": migration.nbytes if migration.nbytes_per_expert else None,
        "bottleneck": migration.bottleneck,
        "seconds": migration.seconds,
    }
    return {**document, "migration": moved}


def survey_document(survey: Survey, problem: str) -> dict[str, object]:
    """What `ucp inspect` found in a checkpoint that cannot be read. `problem`: why it cannot."""
    files = [_file(file) for file in survey.files]
    return {"schema": "ucp.inspect.partial/1", **asdict(survey), "files": files, "problems": [problem]}


def _file(file: SourceFile) -> dict[str, object]:
    """A file; only objects in a bucket have a version."""
    values = asdict(file)
    return values if file.version else {key: value for key, value in values.items() if key != "version"}


def plan_document(report: PlanReport) -> dict[str, object]:
    """What `ucp plan` decided."""
    index = report.source
    values = {field.name: getattr(report, field.name) for field in fields(report)}
    hidden = ["format", "layout", "layouts", "compressed", *([] if report.scratch else ["scratch", "scratch_bytes"])]
    layouts = {"source": values.pop("source_layout"), "target": values.pop("target_layout")}
    return {
        "schema": "ucp.plan/1",
        **{name: value for name, value in values.items() if name not in hidden},
        "source": _source(index),
        "topology": _topology(report.topology),
        "files": [{"path": path, "nbytes": nbytes} for path, nbytes in report.files.items()],
        "patterns": count_patterns(index),
        "layouts": layouts,
    }


def convert_document(report: ConvertReport) -> dict[str, object]:
    """What `ucp convert` did."""
    values = asdict(report)
    scratch = values.pop("scratch_bytes")
    optional = {"scratch_bytes": scratch} if scratch else {}
    values["topology"] = _topology(report.topology)
    return {"schema": "ucp.convert/1", **values, **optional, "seconds": round(report.seconds, 3)}


def verify_document(report: VerifyReport) -> dict[str, object]:
    """What `ucp verify` found."""
    return {"schema": "ucp.verify/1", "ok": report.ok, **asdict(report), "changes": _changes(report.changes)}


def delta_document(report: DeltaReport) -> dict[str, object]:
    """What `ucp delta` wrote."""
    return {"schema": "ucp.delta/1", **asdict(report)}


def diff_document(report: DiffReport) -> dict[str, object]:
    """What `ucp diff` found."""
    return {"schema": "ucp.diff/1", "equal": report.equal, **asdict(report), "changes": _changes(report.changes)}


def _source(index: Index) -> dict[str, object]:
    return {
        "path": index.path,
        "format": index.format,
        "producer": index.producer,
        "topology": _topology(index.topology),
        "step": index.step,
    }


def _topology(topology: Topology | None) -> dict[str, object] | None:
    """Degrees. Where experts are is an argument, not part of the document."""
    if topology is None:
        return None
    return {name: value for name, value in asdict(topology).items() if name != "placement"}


def _atom(atom: AtomIndex, group: int | None, *, pieces: bool) -> dict[str, object]:
    return {
        "kind": atom.kind.value,
        "iteration": atom.iteration,
        "cast": atom.is_cast,
        "shape": list(atom.global_shape),
        "model_dtype": None if atom.model_dtype is None else atom.model_dtype.value,
        "group": group,
        "patterns": dict(atom.patterns),
        "layout": list(atom.layout.lines),
        "made_of": {name: list(layout.lines) for name, layout in atom.made_of.items()},
        "states": {
            name: {
                "dtype": state.dtype.value,
                "shape": list(state.global_shape),
                "nbytes": state.nbytes,
                "overlap": state.overlap.value,
                **({"pieces": [_piece(fragment) for fragment in state.fragments]} if pieces else {}),
            }
            for name, state in atom.states.items()
        },
    }


def _piece(fragment: Fragment) -> dict[str, object]:
    ref = fragment.ref
    return {
        "offsets": list(fragment.box.offsets),
        "sizes": list(fragment.box.sizes),
        "dtype": ref.dtype.value,
        "replica": fragment.replica,
        "term": fragment.term,
        "path": fragment.path,
        "offset": ref.offset if isinstance(ref, TensorRef) else None,
        "strides": list(ref.strides) if isinstance(ref, TensorRef) else None,
        "codec": (ref.codec if isinstance(ref, TensorRef) else "") or None,
    }


def _changes(changes: Sequence[Change]) -> list[dict[str, object]]:
    """Differences; a number that JSON lacks (inf, nan) is a text."""
    return [
        {
            name: repr(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(change).items()
        }
        for change in changes
    ]
