"""Writes a DeepSpeed universal checkpoint, for `load_universal` under ZeRO 1, 2 and 3 with any number of ranks.

    DST/latest, DST/latest_universal                            the tag; written last
    DST/global_step100/mp_rank_00_model_states.pt               read by stages 1 and 2
    DST/global_step100/zero_pp_rank_0_mp_rank_00_model_states.pt  read by stage 3
    DST/global_step100/zero/optimizer_state.pt                  loss scale and groups, for all stages
    DST/global_step100/zero/<parameter>/fp32.pt, exp_avg.pt, ..., step.pt

DeepSpeed's own converter makes a folder for stages 1 and 2 or one for stage 3. This folder is the union of both. Its
model-states files hold what no other file has (frozen parameters and buffers), not a copy of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ucp.core.index import STEP, WEIGHT, Index, Kind
from ucp.core.target import TargetOptions, TargetPlan
from ucp.core.tensor import DType
from ucp.core.topology import Topology
from ucp.errors import MissingStateError, TopologyError, UnsupportedError, UsageError, format_count
from ucp.io.torch_file.draft import FinishedFile, make_target_plan
from ucp_formats.deepspeed.config import Precision
from ucp_formats.deepspeed.experts import is_expert
from ucp_formats.deepspeed.names import LATEST, LATEST_UNIVERSAL
from ucp_formats.deepspeed.read.universal.parameter_folders import check_places, state_path
from ucp_formats.deepspeed.write.autoep import record_layers
from ucp_formats.deepspeed.write.model_states import frozen_shapes, model_state, module_tensors, shapes
from ucp_formats.deepspeed.write.optimizer.groups import (
    Group,
    check_flat,
    check_stepped,
    clipping_keys,
    common_keys,
    describe_without_groups,
    filled_with_zeros,
    group_entry,
    group_notes,
    is_optimized,
    note_step_casts,
    optimizer_groups,
    write_count,
)
from ucp_formats.deepspeed.write.pipeline.layers import PIPELINE, is_pipeline
from ucp_formats.deepspeed.write.rank_views import rank_views
from ucp_formats.deepspeed.write.run import EMULATED, AtomDraft, EngineTarget, RunFacts, is_plain_number, run_facts, tag

_FILE_NAMES = {WEIGHT: "fp32"}
"""State to the stem of its file, where they differ."""

_STAGE3_STATES = ("exp_avg", "exp_avg_sq", STEP)
"""The states that the loader of stage 3 reads; it ignores others."""

_OPTIMIZERS = {"torch": DType.FLOAT32, "deepspeed": DType.INT64}
"""Kind of optimizer that loads the files to the dtype of the step from which it continues (see `optimizer.groups`)."""
_SETTINGS = {"optimizer": "torch or deepspeed: the optimizer that loads the files, which decides the form of the step"}


class DeepSpeedUniversalTarget(EngineTarget):
    """Target `deepspeed-universal`."""

    name = "deepspeed-universal"
    settings = _SETTINGS
    pointers = (LATEST, LATEST_UNIVERSAL)

    def plan(self, index: Index, topology: Topology | None, options: TargetOptions) -> TargetPlan:
        """Files for every ZeRO stage and number of ranks; `topology` may have tp and pp only."""
        wanted = topology or Topology()
        if wanted != Topology(tp=wanted.tp, pp=wanted.pp):
            raise TopologyError(
                "a universal checkpoint is the same for all ZeRO stages and all numbers of ranks: drop --topology, or "
                f"write native files for {wanted} only, with --to deepspeed. Only tp and pp have an effect here: "
                "DeepSpeed before 0.19.8 needs one model-states file for each model-parallel rank of the run"
            )
        if not any(is_optimized(index.atoms[name]) for group in index.groups for name in group.params):
            raise MissingStateError(
                f"expected optimizer groups and states, which DeepSpeed loads together with the weights; {index.path} "
                f"{describe_without_groups(index)}. Start a new optimizer (--optimizer zero), or write stage-0 model "
                "files (--to deepspeed --topology zero=0)"
            )
        stage = index.topology.zero
        stage = 1 if stage is None else stage
        facts = run_facts(index, options, ranks=index.topology.dp, stage=stage, tp=wanted.tp)
        chosen = options.settings.get("optimizer")
        if chosen is not None and chosen not in _OPTIMIZERS:
            raise UsageError(f"expected --set optimizer=torch or optimizer=deepspeed; got {chosen!r}")
        step_dtype = _OPTIMIZERS[chosen] if chosen else DType.FLOAT32 if facts.is_foreign else None
        facts = replace(facts, tp=wanted.tp, pp=wanted.pp, step_dtype=step_dtype, unpacks_steps=True)
        if facts.pp > 1 and not is_pipeline(facts):
            raise TopologyError(
                f"expected a source that a DeepSpeed pipeline saved, with parameters named by layers, for "
                f"pp={facts.pp}; {index.path} is from another run: drop pp"
            )
        groups = [group for group in optimizer_groups(facts) if group.params]
        check_stepped(facts, groups)
        check_flat(groups)
        _check_counts(groups)
        note_step_casts(facts, groups)
        check_places(
            tag(index), {atom.name: tuple(_stems(group).values()) for group in groups for atom in group.params}
        )
        drafted = [
            *_model_files(facts, groups),
            _globals(facts, groups),
            *(file for group in groups for file in _parameter_files(facts, group)),
        ]
        notes = (*group_notes(groups, flat=True), *_warnings(facts, groups))
        return self._finish_plan(facts, make_target_plan(index, drafted, notes=notes), filled_with_zeros(groups))


def _check_counts(groups: Sequence[Group]) -> None:
    """Raise UnsupportedError for counts other than `step`: `load_hp_checkpoint_state` fails with them (0.19.8)."""
    others = dict.fromkeys(name for group in groups for name in group.counts if name != STEP)
    if others:
        left_out = " ".join(f"--exclude '*/{name}'" for name in others)
        raise UnsupportedError(
            f"expected {STEP} to be the only state with one number per parameter, because a universal load of "
            f"DeepSpeed {EMULATED} fails with others; got {', '.join(others)}. Write native files (--to deepspeed), or "
            f"leave it out ({left_out})"
        )


def _model_files(facts: RunFacts, groups: Sequence[Group]) -> Iterator[FinishedFile]:
    """The model-states files; the loader reads their counters and extras, and no weights.

    DeepSpeed before 0.19.8 needs a file for each model-parallel rank of the run that loads them.
    """
    uncut = set()  # tensors without dims, and embeddings whose rows tp does not divide: a run pads them itself
    for name, atom in facts.index.atoms.items():
        shape = atom.global_shape
        padded = facts.rules is not None and facts.rules.padded_vocabulary(name, shape) is not None
        if not shape or (padded and shape[0] % facts.tp > 0):
            uncut.add(name)
    for view in rank_views(facts, Topology(tp=facts.tp, pp=facts.pp), uncut=uncut):
        restored = (Kind.FROZEN, Kind.BUFFER) if view.mp < facts.tp else ()
        for start, kinds in (("", restored), ("zero_pp_rank_0_", ())):
            draft = view.draft(f"{tag(facts.index)}/{start}mp_rank_{view.mp:02d}_model_states.pt")
            module = module_tensors(draft, view, kinds)  # a universal load does not restore these; a script can
            for frozen in frozen_shapes(view.index) if kinds else ():
                atom = view.index.atoms[str(frozen)]
                module.setdefault(atom.name, draft.full(atom.name, WEIGHT, view.module_dtype(atom)))
            values: dict[str, object] = {
                "module": module,
                "param_shapes": shapes(view.index, [[atom.name for atom in group.params] for group in groups]),
                "frozen_param_shapes": frozen_shapes(view.index),
                "shared_params": dict(facts.index.aliases),
                **record_layers(view, place=0, holders=1),
            }
            yield draft.finish(model_state(draft, view, 0, values))


def _globals(facts: RunFacts, groups: Sequence[Group]) -> FinishedFile:
    """`optimizer_state.pt`: `param_groups` is read by stages 1 and 2, `optimizer_state_dict` by stage 3."""
    draft = AtomDraft(f"{tag(facts.index)}/zero/optimizer_state.pt", facts.index)
    entries = [group_entry(draft, facts, group, [number]) for number, group in enumerate(groups)]
    shared = _shared_by_all(entries)
    if facts.extras.get("lr_scheduler") is not None and "lr" in entries[0]:
        # a scheduler sets learning rates only after the first step; for that step, all take the first group's
        shared["lr"] = entries[0]["lr"]
    counts = {name: write_count(draft, facts, atom, name) for name, atom in groups[0].counters.items()}
    common = common_keys(facts, 0)
    if facts.precision is not Precision.FP16:
        del common["loss_scaler"]  # without this key, an engine keeps its own scaler
    root: dict[str, object] = {
        **common,
        **clipping_keys(facts, 0),
        "ds_version": EMULATED,
        **({PIPELINE: True} if is_pipeline(facts) else {}),
        "param_groups": entries,
        "optimizer_state_dict": {"state": {0: counts}, "param_groups": [{**shared, "params": [0]}]},
    }
    return draft.finish(root)


def _shared_by_all(entries: Sequence[dict[object, object]]) -> dict[object, object]:
    """Hyper-parameters on which all groups agree.

    The loader of stage 3 copies the first entry of `param_groups` over every group. For a key that this entry lacks,
    each group keeps the engine's value, so keys that differ between groups are left out.
    """
    first, *others = entries
    return {
        key: value
        for key, value in first.items()
        if key != "params" and all(key in other and other[key] == value for other in others)
    }


def _parameter_files(facts: RunFacts, group: Group) -> Iterator[FinishedFile]:
    """One file per parameter and state, and no others: stages 1 and 2 take every `.pt` file in a folder for a state."""
    stems = _stems(group)
    for atom in group.params:
        for state, stem in stems.items():
            draft = AtomDraft(state_path(tag(facts.index), atom.name, stem), facts.index)
            has_state = state in atom.states
            if state in group.counts:
                yield draft.finish(write_count(draft, facts, atom if has_state else group.counters[state], state))
                continue
            shape = atom.global_shape or (1,)
            keys = {"cat_dim": 0} if facts.rules is None else facts.rules.file_keys(atom.name)
            if atom.name in facts.stacks.counts:
                keys = {"cat_dim": 0, "is_expert_param": True, "ep_num_experts": facts.stacks.counts[atom.name]}
            dtype = group.dtypes[state]
            tensor = draft.full(atom.name, state, dtype, shape=shape) if has_state else draft.add_tensor(dtype, shape)
            yield draft.finish({**keys, "param": tensor})


def _stems(group: Group) -> dict[str, str]:
    """States of each parameter of a group, its weight first, to the stems of their files."""
    return {state: _FILE_NAMES.get(state, state) for state in (WEIGHT, *group.state_names)}


def _warnings(facts: RunFacts, groups: Sequence[Group]) -> Iterator[str]:
    """Warnings about what DeepSpeed silently does not restore from a universal checkpoint, or restores wrongly.

    Loads that fail raise their own errors: docs/reference/deepspeed.md lists them.
    """
    index, atoms = facts.index, facts.index.atoms.values()
    buffers = sum(atom.kind is Kind.BUFFER for atom in atoms)
    frozen = sum(atom.kind is not Kind.BUFFER and not is_optimized(atom) for atom in atoms)
    if buffers or frozen:
        frozen_ones = format_count(frozen, "frozen parameter", "frozen parameters")
        kinds = [text for text, count in ((frozen_ones, frozen), (format_count(buffers, "buffer"), buffers)) if count]
        yield (
            f"a universal load does not restore {' and '.join(kinds)}; they "
            f"are in 'module' of {tag(index)}/mp_rank_00_model_states.pt. Files of --to deepspeed restore them"
        )
    if facts.config.round_robin and not facts.config.parameter_alignment:
        yield (
            "stages 1 and 2 with round_robin_gradients silently load values into the wrong parameters: turn it off "
            "for the load, or use --to deepspeed"
        )
    if facts.rules is None and index.topology.tp > 1:
        yield (
            "the source does not record how tensor-parallel ranks split parameters: load it without tensor "
            "parallelism, or with AutoTP, which has its own record. Any other run with tp > 1 would split every "
            "parameter along dim 0, some of them wrongly, and DeepSpeed would not notice: it compares only the number "
            "of elements"
        )
    if any(map(is_expert, index.atoms)):
        yield (
            "DeepSpeed looks up experts by their numbers on each rank, so it loads these correctly only with "
            "expert-parallel degree 1; for other degrees use --to deepspeed"
        )
    if not is_pipeline(facts):
        yield from _stage3_warnings(facts, groups)


def _stage3_warnings(facts: RunFacts, groups: Sequence[Group]) -> Iterator[str]:
    """Warnings for a load under stage 3 (`load_hp_checkpoint_state_from_checkpoint_dir_stage3`, 0.19.8)."""
    if not all({*_STAGE3_STATES} <= {*group.elementwise, *group.counts} for group in groups):
        return  # stage 3 does not load the files at all
    is_scheduled = facts.extras.get("lr_scheduler") is not None
    entries: list[dict[object, object]] = [dict(group.hyper.items()) for group in groups]
    differing = sorted({str(key) for entry in entries for key in entry.keys() - _shared_by_all(entries).keys()})
    if differing:
        yield (
            f"stage 3 does not restore hyper-parameters that differ between the {len(groups)} groups "
            f"({', '.join(differing)}): each group keeps the engine's configured value"
            f"{'; for the first step, all groups take the lr of the first' if is_scheduled else ''}"
        )
    others = sorted({state for group in groups for state in group.elementwise if state not in _STAGE3_STATES})
    if others:
        yield f"stage 3 leaves out {', '.join(others)}: it loads exp_avg, exp_avg_sq and step only"
    is_tensor = facts.step_dtype is None and not is_plain_number(groups[0].counters[STEP], STEP)
    if is_tensor or facts.step_dtype is DType.FLOAT32:
        yield (
            "stage 3 shares one step tensor between all its sub-groups, so an optimizer step increases it once for "
            "each of them. After loading, replace optimizer.state[p]['step'] by its clone for every p; or use "
            "--to deepspeed, or --set optimizer=deepspeed if the run uses an optimizer of DeepSpeed, which counts with "
            "a number"
        )
