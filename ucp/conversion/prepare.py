"""Decide a conversion: read indexes, plan the target, plan the work. Nothing is written."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from ucp.contract.plugins import names, producer
from ucp.contract.protocols import Engine, Observer, Target
from ucp.contract.registry import add_call_notes, has_data_parallel_rules, target
from ucp.contract.registry import engine as registered_engine
from ucp.contract.sidecars import select_sidecars
from ucp.conversion.options import OPTIONS, ConvertOptions
from ucp.core.gaps import check_doubts, describe_state_gaps, find_state_gaps
from ucp.core.index import TAG, WEIGHT, AtomIndex, Extra, Index
from ucp.core.target import TargetPlan
from ucp.core.topology import Topology
from ucp.errors import FamilyError, MisfitError, MissingStateError, UnsupportedError, UsageError, format_list, nearest
from ucp.io.pickle.values import measure_memory
from ucp.io.provenance import contents_of, is_remote
from ucp.source.moments import ZeroMoments, check_moments, detect_first_step
from ucp.source.new_optimizer import HYPER, add_optimizer, drop_hyper
from ucp.source.read import index_of, pause_gc, read_with_options
from ucp.source.replica_policy import resolve_drift
from ucp.source.run_state import RUN_SETTINGS, place_run_state
from ucp.source.selection import DROP, FROZEN, describe_part, drop_extras, select, set_frozen
from ucp.source.steps import unify_steps
from ucp.transfer.plan.job import Job, make_job
from ucp.transfer.plan.tasks import BLOCK, SCRATCH, fit_workers

_PER_ATOM, _PER_STATE, _PER_PIECE, _PER_PLACEMENT, _PER_BLOCK = 4 << 10, 4 << 10, 1 << 10, 3 << 10, 1 << 10
"""Upper bounds of the bytes in memory, until the end, for each parameter, each state, each piece of a state, each slice
to write, and the checksums of each block."""

_COPIES_OF_EXTRAS = 8
"""Extras are in memory as values, as the pickle they were read from, and as the files that are written of them."""

_THREADS = 2
"""Threads of a worker: one works while the other waits."""


class SilentObserver:
    """Observer that ignores progress."""

    def begin(self, *, title: str, nbytes: int) -> None:
        """Nothing."""

    def advance(self, nbytes: int) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A conversion that is planned and not begun."""

    job: Job
    """What the engine runs."""
    target: Target
    """The target that planned it."""
    engine: Engine | None
    """The engine that carries it out; None: processes on this machine, or just this process if one is enough."""
    workers: int
    """Processes."""
    threads: int
    """Threads in each."""
    fingerprint: str
    """Digest of source files, options and target: two conversions of the same fingerprint write the same bytes."""
    facts: Mapping[str, str]
    """What that digest depends on, by name, in words for messages; options that were not given are left out."""
    warnings: tuple[str, ...] = ()
    """What keeps a run from resuming as it would from the source."""
    reserved_bytes: int = 0
    """Memory that the destination takes in addition to the workers."""

    @property
    def nbytes_out(self) -> int:
        """Bytes of the files with tensors and of the files beside them, without compressed tensors.

        Metadata files, which are written last, are not counted.
        """
        return sum(file.nbytes for file in self.job.target.files)

    @property
    def references(self) -> int:
        """Pieces in files of the source that a virtual destination refers to; 0 for any other."""
        states = () if self.job.target.placements else self.job.index.states()
        return sum(len(state.fragments) for _, _, state in states)

    @property
    def index_bytes(self) -> int:
        """Memory that the index of the source and the plan take, at most, in addition to that of the workers."""
        states = [state for _, _, state in self.job.index.states()]
        pieces = sum(len(state.fragments) for state in states)
        atoms, placements = len(self.job.index.atoms), len(self.job.target.placements)
        extras = measure_memory(extra.value for extra in self.job.index.extras) * _COPIES_OF_EXTRAS
        return (
            atoms * _PER_ATOM
            + len(states) * _PER_STATE
            + pieces * _PER_PIECE
            + placements * _PER_PLACEMENT
            + self.job.nbytes // BLOCK * _PER_BLOCK
            + extras
        )

    @property
    def projected_bytes(self) -> int:
        """Memory that the workers and the destination need at once."""
        each = max((task.projected_bytes for task in self.job.tasks[:1]), default=0)  # tasks are alike
        return self.reserved_bytes + self.workers * self.threads * (each + count_ahead_bytes(self.job.index))


def count_ahead_bytes(index: Index) -> int:
    """Memory that each thread takes to read ahead from buckets; 0 if all files are local."""
    if not is_remote(index.files):
        return 0
    from ucp.io.remote.prefetch import BUDGET

    return BUDGET


def _describe_gaps(full: Index, index: Index) -> Iterator[str]:
    """A warning about states that the source lost, of parameters that `index` has optimizer states of."""
    lost = {
        name: states
        for name, states in find_state_gaps(full).items()
        if name in index.atoms and index.atoms[name].states.keys() - {WEIGHT}
    }
    if lost:
        yield f"{describe_state_gaps(lost)}\nThe weights are complete (--include '*/weight')"


@pause_gc()
def prepare(
    src: Path, options: ConvertOptions, observer: Observer | None = None, *, reserved_bytes: int = 0
) -> Prepared:
    """Decide everything: writes nothing. `reserved_bytes`: memory that the destination needs besides the workers.

    Of tensors it reads samples of moments (all elements, if the samples are zero), and copies if `--drift` chooses one.
    """
    chosen = target(options.to)
    _check_target(chosen, options)
    by_name = bool(options.naming.style or chosen.names)
    takes_rules = chosen.takes_family(options.topology) or has_data_parallel_rules(options.source.patterns)
    read = read_with_options if by_name or takes_rules else index_of
    full = detect_first_step(read(src, source=options.source))
    index = select(full, options.selection)
    check_doubts(index, options.accept)
    warnings = (
        *(f"--accept {problem.kind}: {problem.text}" for problem in index.doubts),
        *_describe_gaps(full, index),
        *(() if chosen.takes_parts else describe_part(full, index)),
    )
    if index.unnamed is not None and chosen.takes_optimizer:
        raise MissingStateError(index.unnamed.reason)
    check_moments(full, options.zero_moments, selection=index)
    index = resolve_drift(index, options.drift, observer or SilentObserver(), memory=options.memory)
    index = unify_steps(index, options.step)
    index, settings = set_frozen(index, options.target.settings)
    if options.optimizer is not None:
        index = add_optimizer(index, settings)
    states = dict.fromkeys(name for _, name, _ in index.states())
    uncast = [state for state in options.target.dtypes if state not in states]
    if uncast:
        raise UsageError(f"no parameter has a state {', '.join(uncast)} to cast; there are {', '.join(states)}")
    index, settings = drop_extras(index, settings)
    index, settings = place_run_state(index, chosen, settings)
    index = add_call_notes(index)
    known = [*chosen.settings, *chosen.source_settings(index)]
    optimizer_settings = HYPER if options.optimizer is not None else ()
    if optimizer_settings:
        settings = drop_hyper(settings, known)
    _check_settings(chosen, known, settings, by_family=by_name, also=optimizer_settings, engine=options.engine)
    index, settings, family = _rename_source(index, chosen, options, settings)
    # once more, without `by_family`: refuse sizes that the family does not use
    _check_settings(chosen, known, settings, also=optimizer_settings, engine=options.engine)
    if options.target.tag:
        others = (extra for extra in index.extras if extra.name != TAG)
        index = replace(index, extras=(*others, Extra(name=TAG, value=options.target.tag)))
    index = select_sidecars(index, options.companions)
    target_options = replace(
        options.target,
        settings=settings,
        family=family or options.source.family or "",
        patterns=str(options.source.patterns or ""),
        keeps_zeros=options.zero_moments is ZeroMoments.KEEP,
    )
    with _raise_misfits():
        plan = chosen.plan(index, _place_experts(chosen, options, index), target_options)
    index = _drop_lost(plan.written or index, plan)
    job = replace(make_job(index, replace(plan, written=None), options.part), fsync=options.fsync)
    workers, threads = choose_workers(options, index, reserved_bytes)
    return Prepared(
        job=job,
        target=chosen,
        engine=options.engine,
        workers=workers,
        threads=threads,
        reserved_bytes=reserved_bytes,
        fingerprint=_compute_fingerprint(index, plan, options),
        facts=_collect_facts(job, options),
        warnings=warnings,
    )


def count_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_workers(options: ConvertOptions, index: Index, reserved_bytes: int = 0) -> tuple[int, int]:
    """Workers, and threads in each, that read what `index` refers to. `reserved_bytes`: memory for others.

    The default is one worker per core; for an engine that works on other machines, too, as many as memory allows.
    """
    most, thread_bytes = count_cores(), BLOCK + SCRATCH + count_ahead_bytes(index)
    if options.engine is not None and options.engine.spans_machines:
        most = max(1, options.memory // (_THREADS * thread_bytes))
    return fit_workers(
        options.memory,
        workers=options.workers or most,
        threads=_THREADS,
        thread_bytes=thread_bytes,
        reserved=reserved_bytes,
    )


def _rename_source(
    index: Index, chosen: Target, options: ConvertOptions, settings: Mapping[str, str]
) -> tuple[Index, Mapping[str, str], str]:
    """The source under the names to write, the settings for the target, and the family, if any."""
    if not (options.naming.style or options.naming.rules or chosen.names):
        return index, settings, ""
    from ucp.source.naming import rename_source  # families are read only where they are needed

    with _raise_misfits():
        renamed = rename_source(index, chosen, options.naming, options.source, settings)
    return renamed.index, {name: value for name, value in settings.items() if name not in renamed.used}, renamed.family


@contextmanager
def _raise_misfits() -> Iterator[None]:
    """Raise UnsupportedError and FamilyError as MisfitError: the chosen family or target does not fit this model."""
    try:
        yield
    except (UnsupportedError, FamilyError) as error:
        raise MisfitError(str(error)) from error


def _check_target(chosen: Target, options: ConvertOptions) -> None:
    """Raise UsageError for replicas, or for a layout, that the target does not have; the message says who has them."""
    topology, layout = options.topology, options.target.layout
    if topology is not None and topology.is_split and not chosen.takes_replicas:
        raise UsageError(
            f"replicas of shards (HSDP) are a feature of torch that --to {chosen.name} does not have. Write "
            f"dp={topology.dp} in place of dp_replicate={topology.dp_replicate},dp_shard={topology.dp_shard}"
        )

    if not layout or layout in chosen.layouts:
        return
    others = [name for name in names("ucp.targets") if layout in target(name).layouts]
    hint = f", which is a layout of --to {others[0]}" if others else ""
    has = f"the layouts {', '.join(chosen.layouts)}" if chosen.layouts else "one layout: drop --layout"
    raise UsageError(f"the target {chosen.name} has {has}; got {layout!r}{hint}")


def _place_experts(chosen: Target, options: ConvertOptions, index: Index) -> Topology | None:
    """The topology that the user asked for, with the placement. Raises UsageError, SourceError for a damaged file."""
    topology, placement = options.topology, options.placement
    if placement is None:
        return topology
    if not chosen.takes_placement:
        raise UsageError(
            f"a placement of experts says what each rank holds; the files of --to {chosen.name} do not depend on it. "
            "Drop --placement, or write --to deepspeed. load_into(..., placement=) takes it for any checkpoint"
        )
    topology = topology or index.topology
    if isinstance(placement, Path):
        from ucp.moe.layers import number_layers
        from ucp.placement.forms import read_placement

        numbers = {number for number, _ in number_layers(index.shapes)}
        placement = read_placement(placement, nodes=topology.ep, moe_layers=numbers)
    return replace(topology, placement=placement)


def _drop_lost(index: Index, plan: TargetPlan) -> Index:
    """The part of `index` that the target holds, with a line for each thing left behind."""
    if not plan.lost:
        return replace(index, dropped=(*index.dropped, *plan.dropped)) if plan.dropped else index
    atoms: dict[str, AtomIndex] = {}
    for name, atom in index.atoms.items():
        lost = plan.lost.get(name, frozenset())
        states = {state: stored for state, stored in atom.states.items() if state not in lost}
        if states:
            atoms[name] = replace(atom, states=states)
    aliases = {alias: name for alias, name in index.aliases.items() if name in atoms}
    return replace(index, atoms=atoms, aliases=aliases, dropped=(*index.dropped, *plan.dropped))


def _check_settings(
    chosen: Target,
    known: Collection[str],
    settings: Mapping[str, str],
    *,
    by_family: bool = False,
    also: Collection[str] = (),
    engine: Engine | None = None,
) -> None:
    """Raise UsageError for settings that the target does not take, listing those that it takes.

    `by_family`: sizes of the model are valid, too, for the family that translates names. `also`: valid settings that
    are not for the target. `engine`: its settings are already taken out.
    """
    unknown = [name for name in settings if name not in known]
    if unknown and by_family:
        from ucp.source.naming import list_size_names

        sizes = list_size_names()
        unknown = [name for name in unknown if name not in sizes]
    if not unknown:
        return
    common = (*(RUN_SETTINGS if chosen.resumes else ()), DROP, FROZEN)
    working = () if engine is None else engine.settings
    near = {name: nearest(name, [*known, *also, *common, *working]) for name in unknown}
    lines = format_list(f"{name}{_suggest(name, similar)}" for name, similar in near.items())
    takes = ", ".join([*chosen.settings, *also, *common])
    more = "; any argument that the source records" if len(known) > len(chosen.settings) else ""
    more += "; sizes of the model by the names of Megatron or config.json (num_attention_heads)" if by_family else ""
    if engine is not None:
        more += f"; the engine {engine.name} takes {', '.join(working) or 'none'}"
    raise UsageError(f"the target {chosen.name} has no such setting (--set):\n{lines}\nIt takes {takes}{more}")


def _suggest(name: str, near: str | None) -> str:
    """The end of a line about an unknown setting: what may have been meant."""
    others = [other for other in names("ucp.engines") if name in registered_engine(other).settings]
    if others:
        return f": a setting of --engine {' or '.join(others)}"
    return f": did you mean {near}?" if near else ""


def _collect_facts(job: Job, options: ConvertOptions) -> dict[str, str]:
    """The value of `Prepared.facts`."""
    facts = {"source": job.index.path}
    for option in OPTIONS.values():
        value = getattr(options, option.name)
        if option.identity and value not in (None, option.default):
            facts[option.identity] = _format_value(value)
    topology = str(options.topology or job.target.topology or "")
    facts |= {**({"topology": topology} if topology else {}), "target": options.to, "program": producer()}
    return facts


def _format_value(value: object) -> str:
    """A value of an option, in words."""
    match value:
        case bool():
            return "yes" if value else "no"
        case dict():
            return ", ".join(f"{name}={member}" for name, member in sorted(value.items()))
        case tuple():
            return ", ".join(map(str, value))
    return str(value)


def _compute_fingerprint(index: Index, plan: TargetPlan, options: ConvertOptions) -> str:
    """Digest of everything that decides what is written, with the contents of the user's own files."""
    literals = xxhash.xxh3_128()
    for file in plan.files:  # with what the target took from elsewhere, such as a config.json
        literals.update(repr((file.path, file.nbytes, [part.offset for part in file.literals])).encode())
        for part in file.literals:
            literals.update(part.data)
    inputs = [
        producer(),
        index.format,
        sorted((file.path, file.nbytes, file.mtime_ns, *filter(None, (file.version,))) for file in index.files),
        {
            option.identity: contents_of(value) if isinstance(value, Path) else value
            for option in OPTIONS.values()
            if option.identity and (value := getattr(options, option.name)) is not None
        },
        literals.hexdigest(),
        BLOCK,
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps(inputs, sort_keys=True, default=str).encode())
