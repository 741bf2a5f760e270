"""Native mixture of experts: which data-parallel ranks hold which experts, and their global numbers.

Optimizer files and `param_shapes` name an expert by its number on its own rank, so the same name means another expert
on another expert-parallel rank; the files of experts name it by its global number (`_save_moe_checkpoint`,
runtime/engine.py, 0.19.8). Experts of expert-parallel rank `e` with `n` experts on each have the numbers `e * n` to
`e * n + n - 1`.

Of `ranks` data-parallel ranks, `ranks / ep` hold the same experts, and ZeRO cuts their optimizer states over these:
every `ep`-th rank, or a stretch of them under `use_data_before_expert_parallelism` (`_create_expert_and_data_parallel`,
utils/groups.py).

>>> holders(ranks=8, ep=2, contiguous=False), holders(ranks=8, ep=2, contiguous=True)
([(0, 2, 4, 6), (1, 3, 5, 7)], [(0, 1, 2, 3), (4, 5, 6, 7)])
>>> renumbered("moe.deepspeed_moe.experts.deepspeed_experts.1.weight", rank=3, local=2)
'moe.deepspeed_moe.experts.deepspeed_experts.7.weight'
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest

from ucp.contract.ranks import Problems
from ucp.core.tensor import TensorRef
from ucp.errors import MalformedError
from ucp.io.pickle.fields import Shape, text
from ucp_formats.deepspeed.read.files import SavedFile
from ucp_formats.deepspeed.read.run import SavedRun

_EXPERT = re.compile(r"(.*\bdeepspeed_experts\.)(\d+)(\..*)")


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to an expert."""
    return _EXPERT.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Numbered:
    """Experts by their global numbers.

    >>> numbered = Numbered.of(f"moe.deepspeed_experts.{n}.w" for n in range(4))
    >>> numbered.owner("moe.deepspeed_experts.3.w", 2), numbered.local("moe.deepspeed_experts.3.w", 2)
    (1, 'moe.deepspeed_experts.1.w')
    """

    counts: Mapping[str, int]
    """Start of the names of a layer's experts to their number, in the order of the model."""

    @classmethod
    def of(cls, names: Iterable[str]) -> Numbered:
        """Those among `names`."""
        counts: dict[str, int] = {}
        for found in map(_EXPERT.fullmatch, names):
            if found is not None:
                counts[found[1]] = max(counts.get(found[1], 0), int(found[2]) + 1)
        return cls(counts)

    def owner(self, name: str, ep: int) -> int | None:
        """Expert-parallel rank, of `ep`, that has the expert of a parameter; None for other parameters."""
        found = _EXPERT.fullmatch(name)
        return None if found is None else int(found[2]) // (self.counts[found[1]] // ep)

    def owners(self, names: Iterable[str], ep: int) -> dict[str, int]:
        """Parameters of experts to the rank of `ep` that has them, but of layers that `ep` does not divide."""
        found = {name: form for name in names if (form := _EXPERT.fullmatch(name)) is not None}
        even = {name: self.counts[form[1]] // ep for name, form in found.items() if self.counts[form[1]] % ep == 0}
        return {name: int(found[name][2]) // each for name, each in even.items()}

    def local(self, name: str, ep: int) -> str:
        """The name by the number on its own rank."""
        found = _EXPERT.fullmatch(name)
        if found is None:
            return name
        return f"{found[1]}{int(found[2]) % (self.counts[found[1]] // ep)}{found[3]}"

    def by_file(self, names: Iterable[str]) -> dict[tuple[int, int], list[str]]:
        """Layer (counted as DeepSpeed counts its MoE layers) and expert to its parameters."""
        layers = {start: number for number, start in enumerate(self.counts)}
        files: dict[tuple[int, int], list[str]] = {}
        for name in names:
            found = _EXPERT.fullmatch(name)
            if found is not None:
                files.setdefault((layers[found[1]], int(found[2])), []).append(name)
        return files


def renumbered(name: str, *, rank: int, local: int) -> str:
    """Global name of an expert's parameter on expert-parallel rank `rank`, with `local` experts on each."""
    found = _EXPERT.fullmatch(name)
    return name if found is None else f"{found[1]}{rank * local + int(found[2])}{found[3]}"


def holders(*, ranks: int, ep: int, contiguous: bool) -> list[tuple[int, ...]]:
    """For each expert-parallel rank the data-parallel ranks that hold its experts, in the order of their shares."""
    each = ranks // ep
    if contiguous:
        return [tuple(range(rank * each, rank * each + each)) for rank in range(ep)]
    return [tuple(range(rank, ranks, ep)) for rank in range(ep)]


def ranks_joined(ranks: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Parameters of an optimizer group by their global names, as one rank with all experts would have them.

    `ranks`: those of each expert-parallel rank, in its order. The experts of a layer come together, whichever ranks
    they lie on, so that any other number of ranks finds its own in the order of the model.

    >>> own = [[f"{n}.deepspeed_experts.{e}.w" for n in "ab"] for e in range(2)]
    >>> [name.replace("deepspeed_experts.", "") for name in ranks_joined(own)]
    ['a.0.w', 'a.1.w', 'b.0.w', 'b.1.w']
    """
    layers = [groupby(names, key=lambda name: form[1] if (form := _EXPERT.fullmatch(name)) else "") for names in ranks]
    runs = [[list(run) for _, run in layer] for layer in layers]
    return tuple(dict.fromkeys(name for alike in zip_longest(*runs, fillvalue=()) for run in alike for name in run))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroups:
    """How the optimizer groups of a run lie over its data-parallel ranks."""

    ranks: int
    """Data-parallel ranks."""
    contiguous: bool
    """Whether ranks with the same experts stand together."""
    local: Mapping[str, int]
    """Start of the names of the experts of a layer to how many of them a rank holds."""
    degrees: tuple[int, ...]
    """Expert-parallel ranks of each optimizer group; 1 for a group of other parameters."""

    @classmethod
    def of(cls, run: SavedRun, groups: Sequence[Iterable[str]]) -> ExpertGroups:
        """Those of a run; `groups`: names of its parameters, with numbers on their own ranks."""
        local = Numbered.of(name for group in groups for name in group).counts
        degrees = [_degree(run, number) if any(map(is_expert, own)) else 1 for number, own in enumerate(groups)]
        contiguous = run.config.raw.get("use_data_before_expert_parallelism") is True
        return cls(ranks=run.ranks, contiguous=contiguous, local=local, degrees=tuple(degrees))

    @property
    def ep(self) -> int:
        """The largest degree."""
        return max(self.degrees, default=1)

    def named(self, name: str, rank: int) -> str:
        """Global name of a parameter of expert-parallel rank `rank`."""
        found = _EXPERT.fullmatch(name)
        return name if found is None else renumbered(name, rank=rank, local=self.local[found[1]])

    def subsets(self, number: int) -> list[tuple[int, ...]]:
        """For each expert-parallel rank of group `number`, the data-parallel ranks that hold its experts."""
        return holders(ranks=self.ranks, ep=self.degrees[number], contiguous=self.contiguous)

    def trained(self, groups: Sequence[Mapping[str, Shape]]) -> dict[str, Shape]:
        """Shapes of all parameters by their global names."""
        return {
            self.named(name, rank): shape
            for own, degree in zip(groups, self.degrees, strict=True)
            for rank in range(degree)
            for name, shape in own.items()
        }


def _degree(run: SavedRun, number: int) -> int:
    """Expert-parallel ranks of optimizer group `number`, which holds experts.

    ZeRO cuts it over `partition_count` ranks; where that is not recorded, the name of the group tells, which DeepSpeed
    makes `ep_size_2`.
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
        f"expected partition_count of group {number} in {file.file.path}, which holds experts, to divide the "
        f"{run.ranks} data-parallel ranks; got {count!r}, and its name is {name!r}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """What the files of experts hold for one model-parallel rank."""

    tensors: Mapping[str, TensorRef]
    """Global name to tensor, by layer and expert."""
    others: Mapping[str, object]
    """What is no tensor."""

    @classmethod
    def of(cls, files: Sequence[SavedFile], problems: Problems) -> Experts:
        """Those of some files, which are to be of one model-parallel rank."""
        tensors: dict[str, TensorRef] = {}
        others: dict[str, object] = {}
        counts: dict[int, set[int]] = {}
        for file in files:
            counts.setdefault(file.name.layer, set()).add(file.name.expert)
            for key, value in file.root.items():
                name = text(key, f"a name in {file.path}")
                if name in tensors:
                    problems.wrong.append(f"extra: {file.name.name} has {name}, which another file of experts has too")
                elif isinstance(value, TensorRef):
                    tensors[name] = value
                else:
                    others[name] = value
        for layer, there in counts.items():
            start = "" if layer < 0 else f"layer_{layer}_"
            mp = files[0].name.mp
            problems.missing += [
                f"{start}expert_{number}_mp_rank_{mp:02d}_model_states.pt (an expert)"
                for number in range(max(there))
                if number not in there
            ]
        return cls(tensors=tensors, others=others)

    def check(self, trained: Mapping[str, Shape], where: str, problems: Problems) -> None:
        """Note experts that the optimizer has and the files of experts do not."""
        lost = [name for name in trained if is_expert(name) and name not in self.tensors]
        numbers = sorted({int(found[2]) for name in lost if (found := _EXPERT.fullmatch(name))})
        if lost:
            problems.missing.append(
                f"files of experts {', '.join(map(str, numbers))}: the optimizer of {where} has {lost[0]}"
                f"{', ...' if len(lost) > 1 else ''}"
            )
