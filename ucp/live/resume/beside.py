"""What is restored beside the model: decided before anything is read, restored when all tensors are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ucp.core.index import Extra, Index
from ucp.live.checkpoint import Checkpoint
from ucp.live.match.items import Findings
from ucp.live.resume.rank_extras import RankPolicy, collect_rank_extras, find_generators
from ucp.live.resume.scheduler import Stateful, find_scheduler_state, make_scaler_state
from ucp.live.resume.values import load_extra
from ucp.live.run.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePlan:
    """What is restored beside the model."""

    steps: tuple[Callable[[], object], ...] = ()
    """Functions that restore it."""
    restored: tuple[str, ...] = ()
    """What they restore, for the report."""
    carried: Mapping[str, object] = field(default_factory=dict)
    """What the policy gives to this rank."""
    dropped: tuple[str, ...] = ()
    """What the policy ignores, with the reason."""
    ignored: tuple[str, ...] = ()
    """Extras that are not used."""

    def with_framework(self, used: Mapping[str, str]) -> ResumePlan:
        """This plan, with what the framework's adapter restored. `used`: extra to what was set from it."""
        restored = (f"{what}, from {name}" for name, what in used.items())
        ignored = tuple(name for name in self.ignored if name not in used)
        return replace(self, restored=(*self.restored, *restored), ignored=ignored)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeOptions:
    """What the user wants restored beside the model."""

    scheduler: object = None
    """A learning rate scheduler, if the run has one."""
    scheduler_key: str | None = None
    """Key of the saved state for it; None to take the one that fits."""
    scaler: object = None
    """A loss scaler, if the run has one."""
    policy: RankPolicy = RankPolicy.DROP
    """What to do with the state that each rank saved for itself."""


def plan_resume(index: Index, findings: Findings, ranks: Ranks, options: ResumeOptions) -> ResumePlan:
    """Decide what is restored. Raises LoadError for what cannot be carried, UsageError, MalformedError."""
    checkpoint = Checkpoint(index)

    def read(extra: Extra) -> object:
        return load_extra(extra, checkpoint.tensor)

    steps: list[Callable[[], object]] = []
    restored: list[str] = []
    used: set[str] = set()

    def restore(kind: str, live: object, source: str, state: dict[str, object]) -> None:
        assert isinstance(live, Stateful)
        steps.append(lambda: live.load_state_dict(state))
        restored.append(f"{kind} {type(live).__name__}, from {source}")

    if options.scheduler is not None:
        saved = find_scheduler_state(index, options.scheduler, read, findings, key=options.scheduler_key)
        if saved is not None:
            restore("scheduler", options.scheduler, saved.key, saved.state)
            extras = [extra for extra in index.extras if extra.name == saved.extra]
            # an extra that holds more than the state is still listed as unused
            used |= {extra.name for extra in extras if extra.is_sidecar or saved.remove_from(extra) is None}
    if options.scaler is not None:
        scale = make_scaler_state(index, options.scaler, read, findings)
        if scale is not None:
            restore("scaler", options.scaler, *scale)
            used.add(scale[0])
    rank_extras = collect_rank_extras(index)
    selected = rank_extras.select(ranks.rank, ranks=ranks.count, policy=options.policy)
    carried = {name: read(extra) for name, extra in selected.items()}
    for name, value in carried.items():
        generators = find_generators(value)
        steps += generators.values()
        if generators:
            restored.append(f"RNG states ({', '.join(generators)}), from {name}")
    not_carried = ", ".join(name for name in rank_extras.values if name not in carried)
    why = "of single ranks; rank_extras='carry' or 'replicate' loads it"
    if options.policy is not RankPolicy.DROP:
        why = "of single ranks; the one that this rank would take it from has none"
    of_single_ranks = {extra.name for by_rank in rank_extras.values.values() for extra in by_rank.values()}
    names = dict.fromkeys(extra.name for extra in index.extras)
    return ResumePlan(
        steps=tuple(steps),
        restored=tuple(restored),
        carried=carried,
        dropped=(f"{not_carried}: {why}",) if not_carried else (),
        ignored=tuple(name for name in names if name not in used and name not in of_single_ranks),
    )
