"""Target `megatron`: a checkpoint that Megatron-LM resumes from.

    DST/latest_checkpointed_iteration.txt      the iteration; written last
    DST/iter_0001000/...                       torch_dist (the default), or one folder per rank (`--layout torch`)

Sources of other frameworks take the same path: a model family translates their names. Arguments that Megatron needs and
the source does not record are derived from shapes where they are certain; the user is asked for the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from ucp.contract.model import parse_values, recorded_arguments, run_arguments
from ucp.contract.optimizer import OptimizerPlan, find_missing_states
from ucp.contract.protocols import Target
from ucp.contract.registry import target_family
from ucp.contract.sidecars import add_sidecars
from ucp.core.gaps import check_weights
from ucp.core.index import STEP, WEIGHT, Index, Kind
from ucp.core.target import Literal, OutputFile, Receipts, TargetOptions, TargetPlan
from ucp.core.tensor import DType
from ucp.core.topology import Topology
from ucp.errors import MissingStateError, UsageError, format_list
from ucp.families.naming import CANONICAL
from ucp.io.torch_file.draft import make_target_plan
from ucp.transfer.probe import Prober
from ucp_formats.megatron.groups import is_by_named_optimizer
from ucp_formats.megatron.modules import choose_modules
from ucp_formats.megatron.names import RELEASE, TRACKER
from ucp_formats.megatron.write.arguments import derive_arguments, parse_config, scaling_note, update_arguments
from ucp_formats.megatron.write.checks import SETTINGS, check_consistency, check_division, check_settings
from ucp_formats.megatron.write.extras import (
    common_state,
    consumed_samples,
    extra_notes,
    lost_extras,
    lost_lines,
    lost_states,
)
from ucp_formats.megatron.write.groups import is_native, make_chain
from ucp_formats.megatron.write.legacy import legacy_places, plan_legacy
from ucp_formats.megatron.write.model import (
    TargetModel,
    TargetRun,
    build_model,
    check_layers,
    check_topology,
    has_expert_optimizer,
    make_axes_of,
    select_rng_states,
)
from ucp_formats.megatron.write.torch_dist import Norms, dist_places, key_style, plan_dist, stored_parts

_LAYOUTS = ("torch_dist", "torch")
_GROUPS_NOT_RECORDED = (
    "torch_dist, and legacy files with the distributed optimizer, do not record the members of groups: write "
    "torch_dist, or legacy files with --set use_distributed_optimizer=true"
)
_EXPERTS_SEPARATE = (
    "With more than one expert-parallel rank, experts have a separate optimizer: write for ep=1, or use a checkpoint "
    "that records the members of groups"
)
_NEVER_STEPPED = "Megatron cannot store a parameter that was never stepped. Train one step more, or write weights only"
_TWO_OPTIMIZERS = (
    "The run trains matrices with {name}, and the other parameters with an optimizer that keeps other states. For "
    "Megatron ucp writes only one optimizer. Write the weights only (--include '*/weight') and let the run "
    "reinitialize the optimizer, or keep all states with --to ucp"
)
_NO_MOMENTS = (
    "no parameter has a moment, and Megatron loads no optimizer without moments: none is written. Start the run with "
    "--no-load-optim: it reinitializes the optimizer, with masters made from the weights in the dtype it computes in"
)


class MegatronTarget(Target):
    """Target `megatron`."""

    name = "megatron"
    settings = SETTINGS
    resumes = True
    layouts = _LAYOUTS

    names = CANONICAL

    def takes_family(self, topology: Topology | None) -> bool:
        """Always true: the rules of the family say how parameters are sharded."""
        return True

    def model_arguments(self, index: Index, settings: Mapping[str, str]) -> Mapping[str, object]:
        """The arguments of a run of Megatron, with the modules that its layers are built from."""
        native, requested = run_arguments(index), parse_values(settings)
        check_settings(requested, native)
        modules = choose_modules(index, native, requested)
        return {**recorded_arguments(index), **modules.settings, **requested}

    def source_settings(self, index: Index) -> Collection[str]:
        """The arguments that the source records."""
        return run_arguments(index)

    def plan(self, index: Index, topology: Topology | None, options: TargetOptions) -> TargetPlan:
        """Files for a run of `topology`, by default that of the source. Raises UsageError, MissingStateError."""
        if options.compress:
            raise UsageError("Megatron's files are not compressed; drop --compress")
        if STEP in options.dtypes:
            raise UsageError(f"Megatron stores {STEP} as a number per param group; drop --dtype {STEP}=...")
        layout = options.layout or _LAYOUTS[0]
        if options.tag:
            raise UsageError(
                f"Megatron finds a checkpoint by its iteration: it is written to {_folder_name(index)}; drop --tag"
            )
        with Prober() as prober:
            optimizer = OptimizerPlan(index, prober)
        run, notes = _build_run(index, topology or replace(index.topology, zero=None), layout, options, optimizer)
        check_division(run)
        requested = parse_values(options.settings)
        check_consistency(requested, run.model, recorded=run_arguments(index), written=run.arguments)
        write = plan_legacy if layout == "torch" else plan_dist
        drafted = write(run, _folder_name(index))
        notes = (*notes, *extra_notes(run))
        mesh = run.topology
        plan = make_target_plan(
            index, drafted, notes=notes, topology=mesh, axes_of=make_axes_of(run), names_rounded=True
        )
        lost = lost_states(run, plan.placements)
        plan = replace(
            plan,
            casts=(*plan.casts, *(optimizer.casts if run.chain else ())),
            lost=lost,
            dropped=(*lost_lines(run, lost, plan.placements), *lost_extras(run)),
            regrouped=not is_native(index),
        )
        return add_sidecars(index, plan, reserved=(TRACKER,))

    def seal(self, index: Index, plan: TargetPlan, receipts: Receipts) -> tuple[OutputFile, ...]:
        """The tracker, from which Megatron knows which iteration to load."""
        data = (RELEASE if index.step is None else str(index.step)).encode()
        return (OutputFile(path=TRACKER, nbytes=len(data), literals=(Literal(0, data),), is_pointer=True),)


def _build_run(
    index: Index, topology: Topology, layout: str, options: TargetOptions, optimizer: OptimizerPlan
) -> tuple[TargetRun, tuple[str, ...]]:
    """The checkpoint to write, and notes on what was assumed."""
    check_topology(topology)
    check_weights(index)
    native, requested = run_arguments(index), parse_values(options.settings)
    modules = choose_modules(index, native, requested)
    overrides = {**modules.settings, **requested}
    weights = DType(options.dtypes[WEIGHT]) if WEIGHT in options.dtypes else None
    model = build_model(index, target_family(index, options, {**native, **overrides})[0], weights=weights)
    arguments, derivation_notes = ({**native, **overrides}, ()) if native else _make_arguments(index, model, overrides)
    check_layers(model, alike=key_style(arguments).stacked)
    chain, notes = make_chain(index, model.expert_params, optimizer, split=has_expert_optimizer(model, topology))
    trained = [tensor for tensor in model.tensors if tensor.kind is Kind.PARAMETER]
    has_moments = any(tensor.states.keys() - {WEIGHT} for tensor in trained)
    if chain and arguments.get("optimizer") != "sgd" and not has_moments:
        chain, notes = (), (_NO_MOMENTS,)
    if chain:
        _check_states(index, model, arguments)
    if chain and layout == "torch" and not arguments.get("use_distributed_optimizer", True):
        optimizer.check_grouped(_find_stepped(index, index.atoms), remedy=_GROUPS_NOT_RECORDED)
    elif len(chain) > 1:
        optimizer.check_grouped(_find_stepped(index, model.expert_params), remedy=_EXPERTS_SEPARATE)
    places = legacy_places(topology) if layout == "torch" else dist_places(topology)
    samples = consumed_samples(index, arguments)
    if samples is not None:
        arguments["consumed_train_samples"] = samples
    random = select_rng_states(index, topology, places)
    run = TargetRun(
        index=index,
        model=model,
        topology=topology,
        arguments=update_arguments(
            arguments,
            topology,
            ckpt_format=layout,
            iteration=index.step or 0,
            has_optimizer=bool(chain),
            has_rng=bool(random),
        ),
        chain=chain,
        common=common_state(index, chain, iteration=index.step or 0, samples=samples or 0),
        rng_states=random,
        dtypes=options.dtypes,
    )
    style = key_style(arguments)
    other = key_style({**arguments, "transformer_impl": "local" if style.norms is Norms.FUSED else ""})
    same = layout == _LAYOUTS[0] and not modules.known_from  # whether modules of both kinds have the same keys
    same = same and all(
        stored_parts(param, model, style) == stored_parts(param, model, other) for param in model.tensors
    )
    return run, (*derivation_notes, *notes, modules.note(same_keys=same))


def _make_arguments(
    index: Index, model: TargetModel, overrides: Mapping[str, object]
) -> tuple[dict[str, object], tuple[str, ...]]:
    """Arguments for a model of another framework, and notes on those that may surprise a user."""
    recorded = recorded_arguments(index)
    stated = parse_config(recorded)
    dtypes = {tensor.dtype for tensor in model.tensors if tensor.kind is Kind.PARAMETER}
    arguments = derive_arguments(model.shapes, dtypes, settings={**stated, **overrides}, source=index.path)
    others = {name: value for name, value in stated.items() if name in overrides and overrides[name] != value}
    notes = [f"--set {name}={overrides[name]} is used, but config.json says {value}" for name, value in others.items()]
    return arguments, tuple(filter(None, [scaling_note(recorded), *notes]))


def _folder_name(index: Index) -> str:
    return RELEASE if index.step is None else f"iter_{index.step:07d}"


def _find_stepped(index: Index, names: Iterable[str]) -> list[str]:
    """The parameters with optimizer states: they would lose these if they were in no group."""
    return [name for name in names if name in index.atoms and index.atoms[name].states.keys() - {WEIGHT}]


def _check_states(index: Index, model: TargetModel, arguments: Mapping[str, object]) -> None:
    """Check that all trained parameters have the same states; `arguments`: of the run."""
    lacking = find_missing_states({param.name: param.states for param in model.tensors if param.kind is Kind.PARAMETER})
    if lacking:
        lines = format_list(f"{name}: {', '.join(states)}" for name, states in lacking.items())
        reasons = index.loss_reasons(lacking)
        two = is_by_named_optimizer(arguments, "", (1, 1))  # matrices have a separate optimizer
        why = _TWO_OPTIMIZERS.format(name=arguments["optimizer"]) if two else _NEVER_STEPPED
        raise MissingStateError(
            f"expected the same optimizer states of all trained parameters; {index.path} lacks\n{lines}\n"
            + ("\n".join(reasons) or why)
        )
