"""Chains: links of one run, read as the newest whole state of every parameter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import ucp
from ucp.chain.merge import LinkIndex, merge
from ucp.chain.staleness import measure_staleness
from ucp.core.index import Index, ParamGroup, StateIndex
from ucp.errors import (
    IdleOptionError,
    MalformedError,
    MissingStateError,
    StaleError,
    UnsupportedError,
    UsageError,
)
from ucp.testing.handmade import Shards, inline, make_index, write_checkpoint

Tensors = Mapping[tuple[str, str], NDArray[np.generic]]
STATES = ("weight", "exp_avg", "exp_avg_sq")
EXPERTS = 4


def make_tensors(names: list[str], value: float) -> dict[tuple[str, str], NDArray[np.generic]]:
    """Tensors of which no two are alike; the first element is `value`, plus the number of the state."""
    rows = np.arange(2 * EXPERTS, dtype="f4").reshape(EXPERTS, 2)
    spread = {name: (1 + sum(map(ord, name))) for name in names}
    return {(name, state): value + n + rows * spread[name] for name in names for n, state in enumerate(STATES)}


def save(folder: Path, tensors: Tensors, step: int | None, groups: tuple[ParamGroup, ...] = ()) -> Path:
    shards = Shards(folder)
    states = {key: shards.whole(array) for key, array in tensors.items()}
    for param in dict.fromkeys(param for param, _ in tensors):
        states[param, "step"] = StateIndex.from_tensor(inline(np.array(step or 0, dtype="f4")))
    params = tuple(dict.fromkeys(param for param, _ in tensors))
    groups = groups or (ParamGroup(params=params, hyper={"lr": (step or 0) / 1000, "betas": (0.9, 0.999)}),)
    write_checkpoint(replace(make_index(folder, states, groups=groups), step=step))
    return folder


def expert(number: int) -> str:
    return f"layers.0.moe.experts.{number}.w"


ROUTER = "layers.0.moe.router.weight"


@pytest.fixture
def rotating(tmp_path: Path) -> Path:
    """A full link at 10, then one expert at a time: at 20 the first, at 30 the second."""
    chain = tmp_path / "chain"
    links = [save(chain / "10", make_tensors([ROUTER, *map(expert, range(EXPERTS))], 10), 10)]
    links += [save(chain / str(s), make_tensors([ROUTER, expert(n)], s), s) for n, s in enumerate((20, 30))]
    ucp.add_to_chain(chain, reversed(links))
    return chain


def test_every_parameter_is_of_its_newest_link(rotating: Path) -> None:
    checkpoint = ucp.open(rotating)
    assert checkpoint.step == 30
    for name, step in {ROUTER: 30, expert(0): 20, expert(1): 30, expert(2): 10, expert(3): 10}.items():
        assert checkpoint.index.atoms[name].iteration == (None if step == 30 else step)
        for n, state in enumerate(STATES):
            assert checkpoint.read(name, state)[0, 0].item() == step + n
        assert checkpoint.read(name, "step").item() == step


@pytest.mark.parametrize(("at", "step"), [(10, 10), (19, 10), (20, 20), (29, 20), ("newest", 30), (1000, 30)])
def test_an_iteration_is_read_as_it_was(rotating: Path, at: int | str, step: int) -> None:
    index = ucp.inspect(rotating, at=at)
    assert index.step == step
    newest = ucp.inspect(rotating / str(step))
    assert index.groups[0].hyper == newest.groups[0].hyper
    assert index.groups[0].params == (ROUTER, *map(expert, range(EXPERTS)))


def test_before_the_chain_there_is_nothing(rotating: Path) -> None:
    with pytest.raises(UsageError, match=r"10 .*--at 9"):
        ucp.inspect(rotating, at=9)
    with pytest.raises(IdleOptionError, match="--at"):
        ucp.inspect(rotating / "10", at=10)


def test_what_is_stale_is_said_and_refused(rotating: Path, tmp_path: Path) -> None:
    """Expert 0 lacks 10 of 30 iterations, experts 2 and 3 lack 20: a mean of (10 + 0 + 20 + 20) / 30 / 4."""
    staleness = measure_staleness(ucp.inspect(rotating))
    assert staleness.params == {10: (expert(2), expert(3)), 20: (expert(0),)}
    assert staleness.plt == pytest.approx(50 / 120)
    (note,) = [note for note in ucp.inspect(rotating).notes if "41.67%" in note]
    assert ucp.experts(rotating).notes == (note,)  # and none of unequal step counts, which follow from it
    assert note in ucp.convert(rotating, tmp_path / "kept", max_plt=0.42).notes
    for source in (rotating, tmp_path / "kept"):
        for options in ({"exact": True}, {"max_plt": 0.41}):
            with pytest.raises(StaleError, match=r"41\.67%"):
                ucp.convert(source, tmp_path / "out", **options)
            with pytest.raises(StaleError):
                ucp.plan(source, **options)
            with pytest.raises(StaleError):
                ucp.inspect(source, **options)
    assert ucp.convert(rotating, tmp_path / "out", exact=True, at=10).notes == ()


def test_a_chain_is_not_a_link(rotating: Path) -> None:
    for link in ("10", "20"):
        with pytest.raises(UsageError, match="own"):
            ucp.add_to_chain(rotating / "10", [rotating / link])
    assert ucp.open(rotating / "10").step == 10
    (rotating / "chain.json").write_text('{"version": 1, "links": [{"path": ".", "iteration": 1}]}')
    with pytest.raises(MalformedError, match="itself"):
        ucp.open(rotating)


@pytest.mark.parametrize("options", [{"to": "dcp", "topology": "dp=1"}, {"to": "torch"}])
def test_links_of_other_formats_are_read_in_the_folder_of_the_chain(rotating: Path, options: dict[str, str]) -> None:
    """It is one of them, and it is not taken for the only checkpoint in that folder."""
    ucp.convert(rotating / "10", rotating / "other", **options)
    shutil.rmtree(rotating / "10")
    (rotating / "chain.json").unlink()
    ucp.add_to_chain(rotating, [rotating / name for name in ("other", "20", "30")])
    assert ucp.open(rotating).read(expert(2))[0, 0].item() == 10
    assert ucp.verify(rotating).ok
    file = max((rotating / "other").iterdir(), key=lambda path: path.stat().st_size)
    with file.open("ab") as longer:
        longer.write(b"x")
    assert any(file.name in problem for problem in ucp.verify(rotating).problems)


def test_links_that_are_added_at_once(tmp_path: Path) -> None:
    """Jobs that each list what they saved: none of the links is lost."""
    links = [save(tmp_path / str(step), make_tensors([ROUTER], step), step) for step in range(1, 9)]
    with ThreadPoolExecutor(len(links)) as pool:
        list(pool.map(lambda link: ucp.add_to_chain(tmp_path / "chain", [link]), links))
    assert len(ucp.add_to_chain(tmp_path / "chain", [])) == len(links)


def test_an_iteration_that_the_chain_lists_otherwise(rotating: Path, tmp_path: Path) -> None:
    assert len(ucp.add_to_chain(rotating, [rotating / "20"], iteration=20)) == 3
    with pytest.raises(UsageError, match="--iteration 20"):
        ucp.add_to_chain(rotating, [rotating / "20"], iteration=21)
    with pytest.raises(UsageError, match="one checkpoint"):
        ucp.add_to_chain(tmp_path / "new", [rotating / "20", shutil.copytree(rotating / "20", tmp_path / "copy")])
    assert not (tmp_path / "new").exists()


def test_a_store_made_of_a_chain_is_equal_to_it(rotating: Path, tmp_path: Path) -> None:
    ucp.convert(rotating, tmp_path / "out", verify=True)
    assert ucp.verify(tmp_path / "out", against=rotating).ok
    assert ucp.diff(tmp_path / "out", rotating).equal
    atoms = ucp.inspect(tmp_path / "out").atoms
    assert {name: atom.iteration for name, atom in atoms.items()} == {
        ROUTER: None, expert(0): 20, expert(1): None, expert(2): 10, expert(3): 10,
    }  # fmt: skip


def test_targets_of_one_step_refuse_until_told(rotating: Path, tmp_path: Path) -> None:
    target = {"to": "deepspeed", "topology": "dp=1,zero=1"}
    with pytest.raises(UnsupportedError, match=r"30(?s:.*)20(?s:.*)--step newest"):
        ucp.convert(rotating, tmp_path / "out", **target)
    report = ucp.convert(rotating, tmp_path / "out", step="newest", **target)
    assert any("3 parameters" in note and "30" in note for note in report.notes)
    written = ucp.open(tmp_path / "out")
    assert {written.read(name, "step").item() for name in written} == {30}


SAVED_STATES = st.sampled_from(["", "weight", "exp_avg", "weight exp_avg", "weight exp_avg"]).map(str.split)
SAVED = st.fixed_dictionaries({expert(n): SAVED_STATES for n in range(EXPERTS)})


@given(st.lists(st.tuples(st.integers(1, 9), SAVED), min_size=1, max_size=5), st.booleans())
def test_laws_of_merging(saved: list[tuple[int, dict[str, list[str]]]], ends_full: bool) -> None:
    """States of a parameter are of one link, the newest with all of them; lost tokens are those routed since then.

    A chain that ends in a full link is that link.
    """
    links, iteration = [], 0
    for number, (gap, states_of) in enumerate(saved, 1):
        iteration += gap
        whole = {name: ["weight", "exp_avg"] for name in states_of if ends_full and number == len(saved)}
        keys = [(name, state) for name, states in (whole or states_of).items() for state in states]
        states = {key: StateIndex.from_tensor(inline(np.full((2,), iteration, "f4"))) for key in keys}
        links.append(LinkIndex(iteration, replace(make_index(Path("x"), states), step=iteration)))
    tokens = {expert(n): 0 for n in range(EXPERTS)}
    expected: dict[str, LinkIndex | None] = {}
    for name in tokens:
        held = [link for link in links if name in link.index.atoms]
        wanted = {state for link in held for state in link.index.atoms[name].states}
        whole_links = [link for link in held if set(link.index.atoms[name].states) == wanted]
        if held:
            expected[name] = whole_links[-1] if whole_links else None
    if None in expected.values():
        with pytest.raises(MissingStateError):
            merge(links, path="x", evidence=())
        return
    merged = merge(links, path="x", evidence=())
    assert merged.atoms.keys() == expected.keys()
    for name, link in expected.items():
        assert link is not None
        atom = merged.atoms[name]
        assert (atom.iteration or iteration, atom.states) == (link.iteration, link.index.atoms[name].states)
        tokens[name] = sum(1 for step in range(1, iteration + 1) if step > link.iteration)
    if ends_full:
        assert merged.atoms == links[-1].index.atoms
    plt = sum(tokens.values()) / iteration / len(expected) if expected else 0.0
    assert measure_staleness(merged).plt == pytest.approx(plt)


def split_states(chain: Path) -> list[Path]:
    """The newest weight, with moments that only an older link has."""
    old = {key: array for key, array in make_tensors([expert(0)], 1).items() if key[1] != "weight"}
    full = make_tensors([expert(1)], 1)
    new = {key: array for key, array in make_tensors([expert(0)], 2).items() if key[1] == "weight"}
    other = make_tensors([expert(0)], 1)
    return [
        save(chain / "a", {**full, (expert(0), "weight"): other[expert(0), "weight"]}, 1),
        save(chain / "b", {**new, (expert(0), "exp_avg"): old[expert(0), "exp_avg"]}, 2),
        save(chain / "c", {**new, (expert(0), "exp_avg_sq"): old[expert(0), "exp_avg_sq"]}, 3),
    ]


def other_model(chain: Path) -> list[Path]:
    wide = {key: np.ones((2, 2), dtype="f4") for key in make_tensors([expert(0)], 1)}
    return [save(chain / "a", make_tensors([expert(0)], 1), 1), save(chain / "b", wide, 2)]


def other_groups(chain: Path) -> list[Path]:
    tensors = make_tensors([expert(0), expert(1)], 1)
    two = tuple(ParamGroup(params=(expert(n),), hyper={"lr": 0.1}) for n in range(2))
    return [save(chain / "a", tensors, 1), save(chain / "b", tensors, 2, two)]


@pytest.mark.parametrize(
    ("make", "error", "data"),
    [
        (split_states, MissingStateError, r"experts\.0\.w(?s:.*)exp_avg(?s:.*)iteration 3"),
        (other_model, MalformedError, r"\[4, 2\](?s:.*)\[2, 2\]"),
        (other_groups, MalformedError, "2 parameter groups(?s:.*)1 in"),
    ],
)
def test_links_that_do_not_go_together(
    make: Callable[[Path], list[Path]], error: type[Exception], data: str, tmp_path: Path
) -> None:
    ucp.add_to_chain(tmp_path, make(tmp_path))
    with pytest.raises(error, match=data):
        ucp.inspect(tmp_path)


class TestTheDocument:
    """`chain.json` as users and accidents leave it."""

    def test_paths_below_it_are_relative(self, rotating: Path, tmp_path: Path) -> None:
        """So that a chain can be moved as a whole."""
        links = json.loads((rotating / "chain.json").read_text())["links"]
        assert [link["path"] for link in links] == ["10", "20", "30"]

    def test_adding_again_changes_nothing(self, rotating: Path) -> None:
        text = (rotating / "chain.json").read_bytes()
        assert [step for step, _ in ucp.add_to_chain(rotating, rotating / "20")] == [10, 20, 30]
        assert (rotating / "chain.json").read_bytes() == text
        assert sorted(path.name for path in rotating.iterdir()) == ["10", "20", "30", "chain.json"]

    @pytest.mark.parametrize(
        ("links", "data"),
        [
            ([], "chain.json"),
            ([{"path": "20", "iteration": 20}, {"path": "10", "iteration": 10}], "10 after 20"),
            ([{"path": "20", "iteration": 20}, {"path": "10", "iteration": 20}], "of 20"),
            ([{"path": "20", "iteration": -1}], "iteration"),
            ([{"path": "", "iteration": 1}], "path"),
            ([{"path": "20"}], "iteration"),
            ([{"path": "20", "iteration": 21}], "iteration 21 in .*20, .*holds iteration 20"),
            (7, "links"),
        ],
    )
    def test_damage(self, rotating: Path, links: object, data: str) -> None:
        (rotating / "chain.json").write_text(json.dumps({"version": 1, "links": links}))
        with pytest.raises(MalformedError, match=data):
            ucp.inspect(rotating)

    def test_a_later_version(self, rotating: Path) -> None:
        (rotating / "chain.json").write_text('{"version": 2, "links": [], "more": 1}')
        with pytest.raises(UnsupportedError, match="2"):
            ucp.inspect(rotating)

    @pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 100_000, b'{"version": 0, "links": []}'])
    def test_rubbish(self, rotating: Path, text: bytes) -> None:
        (rotating / "chain.json").write_bytes(text)
        with pytest.raises(MalformedError, match=r"chain\.json"):
            ucp.inspect(rotating)

    def test_a_link_that_is_gone(self, rotating: Path) -> None:
        (rotating / "20").rename(rotating / "elsewhere")
        with pytest.raises(ucp.errors.SourceError, match="20"):
            ucp.inspect(rotating)

    def test_a_link_by_another_path(self, rotating: Path, tmp_path: Path) -> None:
        """A symbolic link to a listed checkpoint is that checkpoint."""
        text = (rotating / "chain.json").read_bytes()
        (tmp_path / "link").symlink_to(rotating / "20")
        ucp.add_to_chain(rotating, tmp_path / "link")
        assert (rotating / "chain.json").read_bytes() == text

    @pytest.mark.parametrize("iteration", [-1, "7", True, 7.0, 1 << 70])
    def test_numbers_that_are_no_iteration(self, iteration: object, tmp_path: Path) -> None:
        link = save(tmp_path / "link", make_tensors([ROUTER], 1), None)
        with pytest.raises(UsageError, match="iteration"):
            ucp.add_to_chain(tmp_path / "chain", link, iteration=iteration)
        assert not (tmp_path / "chain").exists()

    @pytest.mark.parametrize("file", ["ucp.json", "shard.bin"])
    def test_a_link_that_is_torn(self, rotating: Path, file: str) -> None:
        """Although a newer link is whole: some parameters are only in this one."""
        path = rotating / "10" / file
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(ucp.errors.SourceError, match="10"):
            ucp.open(rotating)
        assert not ucp.verify(rotating).ok

    def test_a_chain_of_chains_is_refused(self, rotating: Path, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="chain"):
            ucp.add_to_chain(tmp_path / "other", [rotating])
        assert not (tmp_path / "other").exists()

    def test_two_checkpoints_of_one_iteration(self, rotating: Path, tmp_path: Path) -> None:
        again = save(tmp_path / "again", make_tensors([expert(0)], 1), 20)
        with pytest.raises(UsageError, match=r"again(?s:.*)20"):
            ucp.add_to_chain(rotating, again)
        assert len(json.loads((rotating / "chain.json").read_text())["links"]) == 3


def test_an_index_knows_no_chain_by_default() -> None:
    assert measure_staleness(Index(path="", format="", evidence=(), producer="", topology=ucp.Topology(), step=None, atoms={})).plt == 0  # fmt: skip  # noqa: E501
