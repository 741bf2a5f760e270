"""The Megatron matrix: sources of real megatron-core, written for other layouts, and loaded by it again.

1. `SOURCES` and `TARGETS` are the rows and columns; `cells` says what is converted and loaded in each.
2. `convert_all` writes the destinations with `ucp.convert`; what it refuses is kept as the message.
3. `megatron_jobs.load_all` loads them.
4. `judge_sources` compares what `ucp` reads of every source with the others and with what the ranks held.
5. The tables are in `megatron_tables.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

import ucp
from tests.integration.megatron.megatron_jobs import Load
from ucp.core.index import STEP, WEIGHT, Index, Kind
from ucp.errors import UcpError
from ucp.transfer.compare import find_drift
from ucp.transfer.differences import Change, compare

MAKER = "0.16.1"
"""release that writes the sources"""

KINDS = ("full", "dp", "torch-zero")
"""Every source is written in three ways, the last word of its name (megatron_cases.py): torch_dist with a
`fully_reshardable` and with a `dp_reshardable` optimizer, and legacy files of the distributed optimizer."""

TIED = "embedding.word_embeddings.weight"
"""The embedding of a GPT, which is its output layer too."""


@dataclass(frozen=True, slots=True)
class Target:
    """A column: a layout to write for and to load at."""

    label: str
    job: str
    """words of the layout, as fixtures/make/megatron/megatron_cases.py has them; empty: the source's"""


@dataclass(frozen=True, slots=True)
class Source:
    """A row: a model, and the layout that Megatron ran it at."""

    model: str
    label: str
    job: str

    def case(self, kind: str, layout: str | None = None) -> str:
        """Name of the checkpoint of this model at its own or another layout."""
        return f"{self.model}-{(layout or self.job).replace(' ', '-')}-{kind}"

    def truth(self, layout: str | None = None) -> str:
        """Name of the file of what the ranks of that layout held."""
        return f"{self.case('', layout).removesuffix('-')}.safetensors"

    @property
    def base(self) -> str:
        """The model without its number of layers."""
        return self.model.rstrip("8")

    def is_written_wrongly(self, kind: str) -> bool:
        """Whether Megatron shifts the states of the tied embedding (docs/reference/megatron.md)."""
        return kind == "full" and self.base == "gpt" and "pp" in self.job

    def at(self, target: Target) -> str:
        """Layout of the job that loads this at `target`."""
        return target.job or self.job


@dataclass(frozen=True, slots=True)
class Route:
    """How a cell is proved once: what is read, what is written, and which release loads that."""

    kind: str
    layout: str
    release: str


@dataclass(frozen=True, slots=True)
class Cell:
    """One conversion and load."""

    source: Source
    target: Target
    route: Route

    @property
    def name(self) -> str:
        own, label = self.route, self.target.label.replace(" ", "-")
        return f"{self.source.case(own.kind)}-to-{label}-{own.layout}-{own.release}"

    @property
    def is_elsewhere(self) -> bool:
        """Whether the release of the route does not run this layout, and another loads it."""
        return all(self.route.release != route.release or self.route.layout != route.layout for route in ROUTES)

    def load(self, root: Path, made: Path) -> Load:
        """The job that loads it from `root`; its ranks must hold what those did that wrote `made` at that layout."""
        return Load(
            name=self.name,
            folder=root / self.name,
            layout=self.source.at(self.target),
            release=self.route.release,
            truth=made / self.source.truth(self.source.at(self.target)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What `ucp` reads of a source, compared."""

    source: Source
    kind: str
    others: Mapping[str, tuple[Change, ...]]
    """label of another layout, or another kind at the same one -> every difference"""
    states: int
    """compared with each of those"""
    not_held: tuple[str, ...]
    """states that are other than what the ranks held"""
    rounded: int
    """masters whose rounding is the model's own weight on the ranks"""
    not_rounded: tuple[str, ...]
    """those whose rounding is not"""
    drifted: tuple[str, ...]
    """weights in the files that are not the master's rounding, and other copies that differ"""


TARGETS = (Target("the same", ""), Target("TP1", "tp1"), Target("TP2 DP4", "tp2 dp4"))
_DENSE = (("TP2 PP2 DP2", "tp2 pp2 dp2"), ("TP4", "tp4"), ("DP4", "dp4"))
_EXPERTS = (("EP4 DP4", "ep4 dp4"), ("TP2 EP2 ETP1", "tp2 ep2 etp1"))
SOURCES = tuple(
    Source(model, label, job)
    for base in ("gpt", "llama", "mixtral")
    for model, layouts in ((base, _DENSE), (f"{base}8", (("PP4 VPP2", "pp4 vpp2"),)), (base, _EXPERTS))
    if base == "mixtral" or layouts is not _EXPERTS
    for label, job in layouts
)
REFERENCES = tuple(target for target in TARGETS if target.job)
"""Layouts that Megatron writes every model at, beside those of the sources."""

ROUTES = (
    Route("dp", "torch_dist", "0.16.1"),
    Route("torch-zero", "torch_dist", "0.19.2"),
    Route("full", "torch", "0.15.3"),
)
WITHOUT = {"0.15.3": ("tp2 ep2 etp1",)}
"""Layouts that a release does not run: 0.15.3 wants sequence parallelism where experts and tensors are cut."""


def cells() -> tuple[Cell, ...]:
    """All cells: every source and target by three routes."""
    return tuple(
        Cell(source, target, _possible(source, target, route))
        for source in SOURCES
        for target in TARGETS
        for route in ROUTES
    )


def _possible(source: Source, target: Target, route: Route) -> Route:
    kind = "torch-zero" if source.is_written_wrongly(route.kind) else route.kind
    release = "0.16.1" if source.at(target) in WITHOUT.get(route.release, ()) else route.release
    return Route(kind, route.layout, release)


def names_to_make() -> tuple[str, ...]:
    """Cases of all rows and of the reference layouts, in all kinds; a layout's stand together."""
    rows = {source.case(kind) for source in SOURCES for kind in KINDS}
    references = {source.case(kind, target.job) for source in SOURCES for target in REFERENCES for kind in KINDS}
    return tuple(sorted(rows | references, key=lambda name: (name.partition("-")[2], name)))


def convert_all(wanted: Iterable[Cell], made: Path, root: Path) -> Mapping[str, str]:
    """Write every destination; name -> what was refused, and why, for those that could not be."""
    refused = {}
    root.mkdir(parents=True, exist_ok=True)
    for cell in wanted:
        path = made / cell.source.case(cell.route.kind) / "checkpoint"
        topology = re.sub(r"([a-z]+)(\d)\s*", r"\1=\2,", cell.source.at(cell.target))
        try:
            ucp.convert(path, root / cell.name, to="megatron", topology=topology, layout=cell.route.layout, workers=1)
        except UcpError as error:
            refused[cell.name] = str(error)
    return refused


def judge_sources(made: Path) -> tuple[Reading, ...]:
    """Compare what `ucp` reads of every source with other layouts, other kinds and the ranks."""
    return tuple(_reading(source, kind, made) for source in SOURCES for kind in KINDS)


def _reading(source: Source, kind: str, made: Path) -> Reading:
    name = source.case(kind)
    index = _index(made, name)
    others = {target.label: source.case("dp", target.job) for target in REFERENCES}
    others |= {own: source.case(own) for own in KINDS[KINDS.index(kind) + 1 :]}
    own = ucp.open(made / name / "checkpoint")
    truth = load_file(made / source.truth())
    rounding = {key: _rounds(own, key, truth) for key in truth if key.endswith("/model")}
    return Reading(
        source=source,
        kind=kind,
        others={label: tuple(compare(index, _index(made, name), _Silent())) for label, name in others.items()},
        states=len(list(index.states())),
        not_held=tuple(_not_held(own, index, truth)),
        rounded=sum(rounding.values()),
        not_rounded=tuple(key for key, holds in rounding.items() if not holds),
        drifted=tuple(find_drift(index, _Silent())),
    )


@cache
def _index(made: Path, name: str) -> Index:
    return ucp.inspect(made / name / "checkpoint")


def _not_held(own: ucp.Checkpoint, index: Index, truth: Mapping[str, Tensor]) -> Iterator[str]:
    """States that the ranks did not hold so, or that are on one side only."""
    seen = set()
    for atom in index.atoms.values():
        for state in atom.states:
            if state == STEP:
                continue
            key = f"{atom.name}/{'buffer' if atom.kind is Kind.BUFFER else state}"
            seen.add(key)
            if key not in truth or not _same(own.read(atom.name, state), truth[key]):
                yield key
    yield from sorted(key for key in truth if key not in seen and not key.endswith("/model"))


def _rounds(own: ucp.Checkpoint, key: str, truth: Mapping[str, Tensor]) -> bool:
    """Whether the master that `ucp` reads, cast by torch, is the weight that the model held."""
    return _same(own.read(key.removesuffix("/model"), WEIGHT).to(truth[key].dtype), truth[key])


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


class _Silent:
    def begin(self, *, title: str, nbytes: int) -> None:
        """Nothing."""

    def advance(self, nbytes: int) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""
