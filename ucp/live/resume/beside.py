"""What a run goes on with beside its model: decided before a byte moves, restored when all is in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ucp.core.index import Extra, Index
from ucp.live.checkpoint import Checkpoint
from ucp.live.match.findings import Findings
from ucp.live.resume.rank_extras import RankPolicy, collect_rank_extras, find_generators
from ucp.live.resume.scheduler import Stateful, find_scheduler_state, make_scaler_state
from ucp.live.resume.values import load_extra
from ucp.live.run.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePlan:
    """What is restored beside the model."""

    steps: tuple[Callable[[], object], ...] = ()
    """Restore it."""
    restored: tuple[str, ...] = ()
    """What that is, for people."""
    carried: Mapping[str, object] = field(default_factory=dict)
    """What the policy gives to this rank."""
    dropped: tuple[str, ...] = ()
    """What it leaves, with the reason."""
    ignored: tuple[str, ...] = ()
    """Extras that nothing was done with."""

    def beside(self, taken: Mapping[str, str]) -> ResumePlan:
        """The same, and what a framework took for its own: extra to what was set by it."""
        told = (f"{what}, from {name}" for name, what in taken.items())
        left = tuple(name for name in self.ignored if name not in taken)
        return replace(self, restored=(*self.restored, *told), ignored=left)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeOptions:
    """What the user wants restored beside the model."""

    scheduler: object = None
    """A learning rate scheduler; None for none."""
    scheduler_key: str | None = None
    """Which of the saved states is for it; None where the states decide."""
    scaler: object = None
    """A scaler of the loss; None for none."""
    policy: RankPolicy = RankPolicy.DROP
    """What to do with what each rank of the saved run kept for itself."""


def plan_resume(index: Index, findings: Findings, ranks: Ranks, asked: ResumeOptions) -> ResumePlan:
    """Decide it. Raises LoadError for what cannot be carried, UsageError, MalformedError."""
    checkpoint = Checkpoint(index)

    def read(extra: Extra) -> object:
        return load_extra(extra, checkpoint.tensor)

    steps: list[Callable[[], object]] = []
    restored: list[str] = []
    used: set[str] = set()
    if asked.scheduler is not None:
        found = find_scheduler_state(index, asked.scheduler, read, findings, key=asked.scheduler_key)
        if found is not None:
            steps.append(_loader(asked.scheduler, found.state))
            restored.append(f"scheduler {type(asked.scheduler).__name__}, from {found.key}")
            used |= {
                own.name
                for own in index.extras
                if own.name == found.extra and (own.is_sidecar or found.remove_from(own) is None)
            }  # which hold nothing beside it
    if asked.scaler is not None:
        scale = make_scaler_state(index, asked.scaler, read, findings)
        if scale is not None:
            name, state = scale
            steps.append(_loader(asked.scaler, state))
            restored.append(f"scaler {type(asked.scaler).__name__}, from {name}")
            used.add(name)
    every = collect_rank_extras(index)
    own = every.select(ranks.rank, of=ranks.count, policy=asked.policy)
    carried = {name: read(extra) for name, extra in own.items()}
    for name, value in carried.items():
        generators = find_generators(value)
        steps += generators.values()
        if generators:
            restored.append(f"random states ({', '.join(generators)}), from {name}")
    left = [name for name in every.values if name not in carried]
    is_asked = asked.policy is not RankPolicy.DROP
    why = "rank 0 has none" if is_asked else "of single ranks; rank_extras='carry' or 'replicate' takes them"
    names = dict.fromkeys(extra.name for extra in index.extras)
    apart = {extra.name for one in every.values.values() for extra in one.values()}
    return ResumePlan(
        steps=tuple(steps),
        restored=tuple(restored),
        carried=carried,
        dropped=(f"{', '.join(left)}: {why}",) if left else (),
        ignored=tuple(name for name in names if name not in used and name not in apart),
    )


def _loader(live: object, state: dict[str, object]) -> Callable[[], object]:
    assert isinstance(live, Stateful)
    return lambda: live.load_state_dict(state)
