"""Native mixture of experts: which data-parallel ranks hold which experts, and the global numbers of the experts.

Optimizer files and `param_shapes` number the experts of each rank from 0, so the same name means a different expert on
each expert-parallel rank. The files of experts use global numbers (`_save_moe_checkpoint`, runtime/engine.py, 0.19.8):
with `n` experts per rank, expert-parallel rank `e` holds experts `e * n` to `e * n + n - 1`.

Of `ranks` data-parallel ranks, `ranks / ep` hold the same experts, and ZeRO partitions the optimizer states of these
experts over them: over every `ep`-th rank, or over adjacent ranks under `use_data_before_expert_parallelism`
(`_create_expert_and_data_parallel`, utils/groups.py).

>>> expert_holders(ranks=8, ep=2, contiguous=False), expert_holders(ranks=8, ep=2, contiguous=True)
([(0, 2, 4, 6), (1, 3, 5, 7)], [(0, 1, 2, 3), (4, 5, 6, 7)])
>>> global_name("moe.deepspeed_moe.experts.deepspeed_experts.1.weight", rank=3, experts_per_rank=2)
'moe.deepspeed_moe.experts.deepspeed_experts.7.weight'
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice, zip_longest

from ucp.contract.plugins import pattern
from ucp.contract.ranks import Problems
from ucp.contract.registry import BY_RULE
from ucp.core.layout import AxisLayout, Pattern
from ucp.core.tensor import TensorRef
from ucp.errors import MalformedError, UnsupportedError
from ucp.io.pickle.fields import Shape, text
from ucp_formats.deepspeed.read.files import SavedFile
from ucp_formats.deepspeed.read.module import SavedModule
from ucp_formats.deepspeed.read.optimizer.flat_group import FlatGroupStates
from ucp_formats.deepspeed.read.run import SavedRun
from ucp_formats.deepspeed.read.stacks import ExpertStacks

_EXPERT = re.compile(r"(.*\bdeepspeed_experts\.)(\d+)(\..*)")


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to an expert."""
    return _EXPERT.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class ExpertNumbers:
    """How many experts each layer has, and so which rank holds an expert and under which name.

    >>> numbers = ExpertNumbers.of(f"moe.deepspeed_experts.{n}.w" for n in range(4))
    >>> numbers.owner("moe.deepspeed_experts.3.w", 2), numbers.local_name("moe.deepspeed_experts.3.w", 2)
    (1, 'moe.deepspeed_experts.1.w')
    """

    counts: Mapping[str, int]
    """Name prefix of a layer's experts to the number of experts, in the order of the model."""
    missing: tuple[str, ...] = ()
    """Experts without any parameter in a layer that has experts of higher numbers; the first thousand of each layer."""

    @classmethod
    def of(cls, names: Iterable[str]) -> ExpertNumbers:
        """The experts among the parameters `names`."""
        layers: dict[str, set[int]] = {}
        for match in filter(None, map(_EXPERT.fullmatch, names)):
            layers.setdefault(match[1], set()).add(int(match[2]))
        counts = {prefix: max(numbers) + 1 for prefix, numbers in layers.items()}
        missing = (f"{prefix}{gap}" for prefix, numbers in layers.items() for gap in _find_gaps(numbers))
        return cls(counts, tuple(missing))

    def owner(self, name: str, ep: int) -> int | None:
        """Which of `ep` expert-parallel ranks holds the expert of a parameter; None for a parameter of no expert."""
        match = _EXPERT.fullmatch(name)
        return None if match is None else int(match[2]) // (self.counts[match[1]] // ep)

    def owners(self, names: Iterable[str], ep: int) -> dict[str, int]:
        """Parameter of an expert to the expert-parallel rank that holds it, in layers whose experts `ep` divides."""
        even = {prefix for prefix, count in self.counts.items() if count % ep == 0}
        experts = [name for name in names if (match := _EXPERT.fullmatch(name)) and match[1] in even]
        return {name: owner for name in experts if (owner := self.owner(name, ep)) is not None}

    def local_name(self, name: str, ep: int) -> str:
        """The name of a parameter with the number that its expert has on the rank that holds it."""
        match = _EXPERT.fullmatch(name)
        return name if match is None else f"{match[1]}{int(match[2]) % (self.counts[match[1]] // ep)}{match[3]}"

    def params_by_file(self, names: Iterable[str]) -> dict[tuple[int, int], list[str]]:
        """(MoE layer, expert), numbered as in DeepSpeed's file names, to the parameters of that expert."""
        layers = {prefix: number for number, prefix in enumerate(self.counts)}
        files: dict[tuple[int, int], list[str]] = {}
        for match in filter(None, map(_EXPERT.fullmatch, names)):
            files.setdefault((layers[match[1]], int(match[2])), []).append(match[0])
        return files


def _find_gaps(numbers: set[int]) -> Iterable[int]:
    """Numbers missing below the largest one: a thousand at most, because a damaged name can have a huge number."""
    return islice((number for number in range(max(numbers)) if number not in numbers), 1000)


def global_name(name: str, *, rank: int, experts_per_rank: int) -> str:
    """Global name of an expert's parameter on expert-parallel rank `rank`."""
    match = _EXPERT.fullmatch(name)
    return name if match is None else f"{match[1]}{rank * experts_per_rank + int(match[2])}{match[3]}"


def expert_holders(*, ranks: int, ep: int, contiguous: bool) -> list[tuple[int, ...]]:
    """For each expert-parallel rank, the data-parallel ranks that hold its experts, in the order of their shares."""
    count = ranks // ep
    if contiguous:
        return [tuple(range(rank * count, rank * count + count)) for rank in range(ep)]
    return [tuple(range(rank, ranks, ep)) for rank in range(ep)]


def merge_names(ranks: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Global names of the parameters of an optimizer group, in the order of a run in which one rank has all experts.

    `ranks`: the global names on each expert-parallel rank, in the order of its group. The experts of a layer become
    adjacent, whichever ranks hold them, so that a run with another number of ranks has them in the order of the model.

    >>> ranks = [[f"{n}.deepspeed_experts.{e}.w" for n in "ab"] for e in range(2)]
    >>> [name.replace("deepspeed_experts.", "") for name in merge_names(ranks)]
    ['a.0.w', 'a.1.w', 'b.0.w', 'b.1.w']
    """
    layers = [groupby(names, key=lambda name: form[1] if (form := _EXPERT.fullmatch(name)) else "") for names in ranks]
    runs = [[list(run) for _, run in layer] for layer in layers]
    return tuple(dict.fromkeys(name for alike in zip_longest(*runs, fillvalue=()) for run in alike for name in run))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroups:
    """How the optimizer groups of a run are distributed over its data-parallel ranks."""

    ranks: int
    """Data-parallel ranks."""
    contiguous: bool
    """Whether ranks with the same experts are adjacent."""
    per_rank: Mapping[str, int]
    """Name prefix of a layer's experts to the number of experts that a rank holds."""
    degrees: tuple[int, ...]
    """Ranks with different parts of each optimizer group: expert-parallel ones, or all; 1 for other parameters."""
    is_cut: tuple[bool, ...]
    """Whether each optimizer group has parameters with `cuts`."""
    stacks: ExpertStacks
    """Parameters with the experts of a rank along dim 0."""
    cuts: Mapping[str, Pattern]
    """Parameters of which every data-parallel rank trains a part, by the user's rules."""

    @classmethod
    def of(cls, run: SavedRun, groups: Sequence[Iterable[str]]) -> ExpertGroups:
        """The groups of a run; `groups`: names of the parameters of each, in which every rank counts experts from 0."""
        per_rank = ExpertNumbers.of(name for group in groups for name in group).counts
        stacks, degrees = run.model.stacks, []
        for at, group in enumerate(groups):
            stacked, cuts = [name in stacks.counts for name in group], [run.cuts.get(name) for name in group]
            if (any(stacked) and stacks.ep > 1 and not all(stacked)) or len({*cuts}) > 1:
                what = "parameters with one rule for dp" if any(cuts) else "stacked experts"
                raise UnsupportedError(f"expected group {at} of {run.folder} to have {what} or others; it has both")
            if any(cuts) and (degree := _expert_degree(run, at)) != run.ranks:
                raise UnsupportedError(
                    f"expected a part of {', '.join(group)} on each of {run.ranks} data-parallel ranks, by the rule "
                    f"for dp; got {degree} parts, by partition_count in {run.folder}"
                )
            is_expert_group = any(cuts) or any(map(is_expert, group))
            degrees.append(stacks.ep if any(stacked) else _expert_degree(run, at) if is_expert_group else 1)
        if run.ranks % stacks.ep:
            raise MalformedError(f"expected ep_size in {run.folder} to divide {run.ranks} ranks; got {stacks.ep}")
        contiguous = run.config.groups_experts
        return cls(
            ranks=run.ranks,
            contiguous=contiguous,
            per_rank=per_rank,
            degrees=tuple(degrees),
            is_cut=tuple(not run.cuts.keys().isdisjoint(group) for group in groups),
            stacks=stacks,
            cuts={name: run.cuts[name] for group in groups for name in group if name in run.cuts},
        )

    @property
    def ep(self) -> int:
        """Expert-parallel degree of the run: the largest of all groups of experts."""
        return max((degree for degree, cut in zip(self.degrees, self.is_cut, strict=True) if not cut), default=1)

    def global_name(self, name: str, rank: int) -> str:
        """Global name of a parameter of expert-parallel rank `rank`."""
        match = _EXPERT.fullmatch(name)
        return name if match is None else global_name(name, rank=rank, experts_per_rank=self.per_rank[match[1]])

    def holders(self, number: int) -> list[tuple[int, ...]]:
        """For each expert-parallel rank of group `number`, the data-parallel ranks that hold its experts."""
        return expert_holders(ranks=self.ranks, ep=self.degrees[number], contiguous=self.contiguous)

    def on_rank(self, group: FlatGroupStates, number: int, ep_rank: int) -> FlatGroupStates:
        """Group `number` with its experts as expert-parallel rank `ep_rank` holds them; a group of others unchanged."""
        degree = self.degrees[number]
        if degree == 1:
            return group
        counts = self.stacks.counts
        parts = {n: (counts[n], *shape[1:]) for n, shape in group.shapes.items() if n in counts}
        parts |= {n: self._global_shape(n, shape) for n, shape in group.shapes.items() if n in self.cuts}
        unique = AxisLayout("ep", degree, pattern("unique", owner=ep_rank), "partition_count")
        axes = {name: self._axis(name) or unique for name in group.shapes}
        return replace(
            group,
            label=f"{group.label} of {'data' if self.is_cut[number] else 'expert'}-parallel rank {ep_rank}",
            names={} if parts else {name: self.global_name(name, ep_rank) for name in group.shapes},
            global_shapes=parts,
            coords={axis.axis: ep_rank for axis in axes.values()},
            axes={name: (axis,) for name, axis in axes.items()},
        )

    def _axis(self, name: str) -> AxisLayout | None:
        if name in self.cuts:
            return AxisLayout("dp", self.ranks, self.cuts[name], BY_RULE)
        return self.stacks.axis(name) if name in self.stacks.counts else None

    def _global_shape(self, name: str, shape: Shape) -> Shape:
        if name in self.cuts:
            return self.cuts[name].whole_shape([shape] * self.ranks)
        return self.stacks.global_shape(name, shape)

    def local_shapes(self, shapes: Mapping[str, Shape], ep_rank: int) -> dict[str, Shape]:
        """Shapes of a group on an expert-parallel rank; `shapes`: on rank 0, as `param_shapes` has them."""
        return {name: self.stacks.local_shape(name, shape, ep_rank) for name, shape in shapes.items()}

    def global_shapes(self, groups: Sequence[Mapping[str, Shape]]) -> dict[str, Shape]:
        """Shapes of all parameters by their global names."""
        return {
            self.global_name(name, rank): self._global_shape(name, shape)
            for shapes, degree in zip(groups, self.degrees, strict=True)
            for rank in range(degree)
            for name, shape in shapes.items()
        }


def _expert_degree(run: SavedRun, number: int) -> int:
    """Expert-parallel ranks of optimizer group `number`, which holds experts.

    The degree follows from `partition_count`, the ranks that ZeRO partitions the group over; where that is not
    recorded, from the name that DeepSpeed gives the group, for example `ep_size_2`.
    """
    file = next(iter(run.optimizers.values()))
    count = file.counts[number] if file.counts is not None and number < len(file.counts) else None
    if count and run.ranks % count == 0:
        return run.ranks // count
    name = file.torch.groups[number].name if number < len(file.torch.groups) else ""
    sized = re.fullmatch(r"ep_size_(\d+)", name)
    if count is None and sized and int(sized[1]) and run.ranks % int(sized[1]) == 0:
        return int(sized[1])
    raise MalformedError(
        f"expected partition_count of group {number}, which holds experts, in {file.file.path} to divide the "
        f"{run.ranks} data-parallel ranks; got {count!r}, and the group is named {name!r}"
    )


def read_experts(files: Sequence[SavedFile], problems: Problems) -> SavedModule:
    """Tensors and other values of the files of experts of one model-parallel rank, by global name."""
    tensors: dict[str, TensorRef] = {}
    others: dict[str, object] = {}
    experts: dict[int, set[int]] = {}
    for file in files:
        experts.setdefault(file.name.layer, set()).add(file.name.expert)
        for key, value in file.root.items():
            name = text(key, f"a name in {file.path}")
            if name in tensors:
                problems.wrong.append(f"extra: {file.name.name} holds {name}, which another expert file holds too")
            elif isinstance(value, TensorRef):
                tensors[name] = value
            else:
                others[name] = value
    for layer, numbers in experts.items():
        prefix = "" if layer < 0 else f"layer_{layer}_"
        problems.missing += [
            f"{prefix}expert_{number}_mp_rank_{files[0].name.mp:02d}_model_states.pt (an expert)"
            for number in _find_gaps(numbers)
        ]
    return SavedModule(tensors=tensors, others=others)


def check_experts_saved(experts: SavedModule, trained: Iterable[str], where: str, problems: Problems) -> None:
    """Add a problem for experts that the optimizer has and the expert files do not; `trained`: its parameters."""
    missing = [match for match in map(_EXPERT.fullmatch, trained) if match and match[0] not in experts.tensors]
    if missing:
        numbers = sorted({int(match[2]) for match in missing})
        problems.missing.append(
            f"files of experts {', '.join(map(str, numbers))}: the optimizer of {where} trains {missing[0][0]}"
            f"{', ...' if len(missing) > 1 else ''}"
        )
