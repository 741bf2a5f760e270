"""Every tensor of the kept checkpoints lies over every axis as a declared pattern places it, and no other way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
from ucp_patterns.replicate import Replicate
from ucp_patterns.shard import Shard

import ucp
from tests.cli.pages.web.test_page import names as page_names
from tests.registry import checkpoints, count, degrees, kinds, read
from ucp.conversion.options import make_options
from ucp.conversion.prepare import prepare
from ucp.core.index import AtomIndex, Index
from ucp.core.layout import AxisLayout, Layout, Overlap, Pattern, place
from ucp.core.region import Box, RegionPair
from ucp_cli.pages.web.contents import inspect_contents
from ucp_cli.pages.web.write import render

CASES = {path.parent.name: path for path in checkpoints()}
RECORDED = {"fsdp1-local-orig-dp2"}
"""Checkpoints that record what each rank has of a parameter, and not the alignment that it follows from."""
OF_RANKS = [name for name, path in CASES.items() if not list(path.rglob(".metadata"))]
"""DeepSpeed, legacy Megatron and torch.save: files of ranks."""
ONE_FILE = {"z0-bf16", "z0-bf16-unstepped", "z0-fp16", "z0-fp16-unfused", "z0-fp32"}
ONE_FILE |= {"ddp-dp2-nanogpt", "fsdp2-dp2-full", "lightning"}
"""Those of them in one file for all ranks."""


@pytest.mark.parametrize("case", CASES)
def test_a_kept_checkpoint_lies_as_its_patterns_say_and_has_a_page(case: str) -> None:
    index = read(CASES[case])  # once for all that is said of it
    check_placed(index, case)
    check_wrong_layouts_are_noticed(index, case)
    if case in OF_RANKS:
        check_layouts_can_be_wrong(index, case)
    contents = inspect_contents(index)
    assert page_names(contents.data) == list(index.atoms)
    assert "</html>" in render(contents)


def check_placed(index: Index, case: str) -> None:
    kinds_allowed = {"placed", "checked", *({"recorded"} if case in RECORDED else ())}
    assert {axis: dict(kinds) for axis, kinds in count(index).items() if set(kinds) - kinds_allowed} == {}
    assert all(axis.known_from for atom in index.atoms.values() for axis in atom.layout.all_axes)
    bare = (replace(atom, layout=Layout()) for atom in index.atoms.values())
    assert {kind for atom in bare for kind in kinds(index, atom).values()} <= {"not placed"}


@dataclass(frozen=True, slots=True)
class Turned:
    """What a pattern gives every part goes to the one before."""

    inner: Pattern

    @property
    def name(self) -> str:
        return f"turned {self.inner.name}"

    @property
    def overlap(self) -> Overlap:
        return self.inner.overlap

    def regions(self, global_shape: tuple[int, ...], parts: int, index: int) -> tuple[RegionPair, ...]:
        return self.inner.regions(global_shape, parts, (index + 1) % parts)

    def whole_shape(self, local_shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
        return self.inner.whole_shape(local_shapes)


def across(pattern: Pattern) -> Pattern:
    """The same cut of the other dim of a matrix."""
    return Shard(dim=1 - pattern.dim) if isinstance(pattern, Shard) and pattern.dim < 2 else pattern


MUTATIONS: Mapping[str, Callable[[Pattern], Pattern]] = {
    "replicated": lambda _: Replicate(),
    "turned": Turned,
    "across": across,
}


def is_along(laid: AxisLayout, axis: str) -> bool:
    return laid.axis == axis or laid.axis.startswith(f"{axis}_")


def mutated(atom: AtomIndex, change: Callable[[Pattern], Pattern], axis: str) -> AtomIndex:
    """The atom with another pattern over one axis."""

    def changed(axes: tuple[AxisLayout, ...]) -> tuple[AxisLayout, ...]:
        return tuple(replace(own, pattern=change(own.pattern)) if is_along(own, axis) else own for own in axes)

    if change is across and len(atom.global_shape) != 2:
        return atom
    return replace(atom, layout=Layout(changed(atom.layout.axes), changed(atom.layout.flat)))


def boxes(atom: AtomIndex) -> list[set[Box]]:
    """What each rank holds; nothing where no tensor of that shape can lie like this."""
    ranks = atom.layout.ranks()
    try:
        return [{own.box for own in place(atom.layout, atom.global_shape, coords=at) if own.box.numel} for at in ranks]
    except ValueError:
        return []


def check_wrong_layouts_are_noticed(index: Index, case: str) -> None:
    """Of boxes of `.metadata` no rank is recorded: there only layouts of other boxes are wrong to see."""
    has_ranks = case in OF_RANKS
    unnoticed = []
    for (name, atom), mutation in product(index.atoms.items(), MUTATIONS):
        for axis, kind in kinds(index, atom).items():
            other = mutated(atom, MUTATIONS[mutation], axis)
            if has_ranks:
                is_wrong = kind == "placed" and boxes(other) != boxes(atom)
            else:
                is_wrong = set().union(*boxes(other)) != set().union(*boxes(atom))
            if is_wrong and kinds(index, other)[axis] != "not placed":
                unnoticed.append((name, axis, mutation))
    assert unnoticed == []


def check_layouts_can_be_wrong(index: Index, case: str) -> None:
    found = [kinds(index, atom) for atom in index.atoms.values()]
    assert any("placed" in own.values() for own in found) == (case not in ONE_FILE)
    turned = [mutated(atom, Turned, axis) for atom in index.atoms.values() for axis in kinds(index, atom)]
    assert any("not placed" in kinds(index, atom).values() for atom in turned) == (case not in ONE_FILE)


@pytest.mark.parametrize(
    ("case", "to", "options"),
    [
        ("z1-pp2-tp2-dp2-bf16", "deepspeed", {}),
        ("z2-ep2-dp4-contiguous", "deepspeed", {}),
        ("z0-pp2", "deepspeed", {}),
        ("z2-dp4-bf16", "deepspeed", {"topology": "dp=2,zero=3"}),
        ("fsdp2-pp2-dp2", "dcp", {}),
        ("fsdp2-dp2-tp2", "dcp", {"topology": "dp_replicate=2,dp_shard=2,tp=2"}),
        ("llama-pp2-vpp2-dp2-torch-zero", "megatron", {"layout": "torch"}),
        ("mixtral-pp2-ep2-dp2-dp", "megatron", {}),
        ("mixtral-tp2-ep2-etp1-torch-zero", "megatron", {"layout": "torch", "topology": "dp=2,tp=2,ep=2,etp=2"}),
    ],
)
def test_a_plan_has_the_layout_that_the_files_are_read_with(
    case: str, to: str, options: dict[str, str], tmp_path: Path
) -> None:
    plan = prepare(CASES[case], make_options(to=to, **options)).job.target
    ucp.convert(CASES[case], tmp_path / "out", to=to, workers=1, **options)
    index = read(tmp_path / "out")
    for atom in (own for own in index.atoms.values() if own.nbytes):
        for name, state, layout in atom.layouts():
            planned = plan.layouts.get((name, state), Layout())
            assert {what for what, _ in planned.descriptions} == {what for what, _ in layout.descriptions}, (
                name,
                state,
            )
            assert {axis.axis for axis in planned.all_axes} >= degrees(index, name).keys() - {"dp"}
            assert all(axis.known_from for axis in planned.all_axes)
