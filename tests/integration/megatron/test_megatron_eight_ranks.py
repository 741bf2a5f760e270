"""Layouts and vocabularies of Megatron's own tests: eight ranks, and padding that depends on tensor parallelism.

The pairs of layouts and the vocabularies are those of `test_gpt_model.py` and `test_moe_experts.py` in
tests/unit_tests/dist_checkpointing/models of Megatron-LM (core_v0.20). Megatron pads a vocabulary to a multiple of 128
x tp rows. Rows that a run of another tp pads to are its own: what is added at loading is zeros, what is left out was
padding, and no row of the vocabulary is ever other than it was, in weights, masters and moments alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ucp
from tests.integration.matrix_page import write_section
from tests.integration.megatron.megatron_jobs import Load, Loaded, load_all, make_sources
from ucp.core.index import STEP, Kind

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

MAKER, LOADER = "0.16.1", "0.19.2"
KINDS = {"dp": "torch_dist", "torch-zero": "torch"}
"""Kind of a source to the kind of files that is written of it."""
_UNIT = 128
"""make_vocab_size_divisible_by"""
_ENDS = ("embedding.word_embeddings.weight/", "output_layer.weight/")


@dataclass(frozen=True, slots=True)
class Pair:
    """A source, and the layout that it is written for and loaded at."""

    model: str
    src: str
    dst: str

    def __str__(self) -> str:
        return f"{self.model} {self.src} to {self.dst}".replace(" ", "-")

    def source(self, kind: str) -> str:
        """Name of the checkpoint."""
        return f"{self.model}-{self.src.replace(' ', '-')}-{kind}"

    def name(self, kind: str) -> str:
        """Name of what is written."""
        return f"{self.source(kind)}-to-{self.dst.replace(' ', '-')}"

    @property
    def truth(self) -> str:
        """What the ranks of the source held."""
        return f"{self.source('').removesuffix('-')}.safetensors"

    @property
    def topology(self) -> str:
        """The target as `ucp` is told it."""
        return re.sub(r"([a-z]+)(\d)\s*", r"\1=\2,", self.dst)

    def rows(self, layout: str) -> int:
        """Rows that a run of a layout pads the vocabulary to; 0 for a model whose rows are the same at all of them."""
        if not self.vocabulary:
            return 0
        tp = re.search(r"tp(\d)", layout)
        unit = _UNIT * (int(tp[1]) if tp else 1)
        return -(-self.vocabulary // unit) * unit

    @property
    def vocabulary(self) -> int:
        """Rows without padding; 0 where that is not the question."""
        return int(self.model.removeprefix("vocab")) if self.model.startswith("vocab") else 0

    @property
    def padded_alike(self) -> bool:
        """Whether both runs have the same rows, without which files of ranks are not loaded."""
        return self.rows(self.src) == self.rows(self.dst)


PAIRS = (
    Pair("vocab128", "tp2 pp4", "tp4 pp2"),
    Pair("vocab17", "pp8", "tp8"),
    Pair("vocab127", "pp8", "tp8"),
    Pair("vocab31123", "tp1", "pp8"),
    Pair("vocab17", "tp1", "pp8"),
    Pair("vocab31123", "tp8", "tp1"),
    Pair("vocab17", "tp2", "pp8"),
    Pair("vocab17", "tp1", "tp2 pp2"),
    Pair("vocab17", "tp1", "tp2 pp4"),
    Pair("vocab17", "tp2 pp4", "tp2 pp4"),
    Pair("experts8", "ep8 dp8", "ep2 dp2"),
    Pair("experts8", "tp2 pp2 ep2 etp2 dp2", "tp4 pp2 etp4"),
    Pair("experts8", "ep4 dp4", "tp8 etp8"),
    Pair("experts8", "tp2 ep4 etp1 dp4", "tp2 etp4 dp2"),
)
OVERWRITTEN = Pair("experts8", "tp2 ep4 etp1 dp4", "tp2 etp4 dp2")
"""Ranks with different parts of an expert have one name in files of ranks."""
CELLS = [
    (pair, kind) for pair in PAIRS for kind in KINDS if kind == "dp" or (pair.padded_alike and pair != OVERWRITTEN)
]
UNLIKE = [pair for pair in PAIRS if not pair.padded_alike]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the whole run found."""

    made: Path
    """folder of the sources"""
    loaded: Mapping[str, Loaded]
    """name of what was written -> outcome"""
    notes: Mapping[str, tuple[str, ...]]
    """the same -> what the conversion noted"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Make, convert, load, and write the section of the page."""
    made, root = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("converted")
    make_sources(dict.fromkeys(pair.source(kind) for pair in PAIRS for kind in KINDS), made, release=MAKER)
    loads, notes = [], {}
    for pair, kind in CELLS:
        name = pair.name(kind)
        own = ucp.convert(
            made / pair.source(kind) / "checkpoint",
            root / name,
            to="megatron",
            topology=pair.topology,
            layout=KINDS[kind],
            settings={"padded_vocab_size": pair.rows(pair.dst)} if pair.vocabulary else {},
            workers=1,
        )
        notes[name] = tuple(own.notes)
        truth = repadded(made / pair.truth, pair.rows(pair.dst), root / f"{name}.safetensors")
        loads.append(Load(name=name, folder=root / name, layout=pair.dst, release=LOADER, truth=truth))
    outcome = Found(made=made, loaded=load_all(loads, root / "results"), notes=notes)
    write_section("eight-ranks", _section(outcome))
    return outcome


def repadded(truth: Path, rows: int, path: Path) -> Path:
    """The truth with so many rows of the vocabulary: those that are left out are gone, those added are zeros."""
    held = load_file(truth)
    for key in [key for key in held if rows and key.startswith(_ENDS)]:
        own = torch.zeros(rows, held[key].shape[1], dtype=held[key].dtype)
        own[: len(held[key])] = held[key][:rows]
        held[key] = own
    save_file(held, path)
    return path


@pytest.mark.parametrize(("pair", "kind"), CELLS, ids=str)
def test_megatron_holds_the_truth_with_its_own_padding(pair: Pair, kind: str, found: Found) -> None:
    own = found.loaded[pair.name(kind)]
    assert not own.error
    assert own.differences == ()
    assert own.tensors >= 60
    said = [note for note in found.notes[pair.name(kind)] if "rows here" in note]
    assert len(said) == (not pair.padded_alike)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pair", dict.fromkeys(Pair(own.model, own.src, "tp1") for own in PAIRS), ids=str)
def test_what_is_read_is_what_the_ranks_held(pair: Pair, kind: str, found: Found) -> None:
    """At any layout: the rows of one rank after the other, padding at the end and nowhere else."""
    checkpoint = ucp.open(found.made / pair.source(kind) / "checkpoint")
    truth, seen = load_file(found.made / pair.truth), 0
    for atom in checkpoint.index.atoms.values():
        for state in set(atom.states) - {STEP}:
            key = f"{atom.name}/{'buffer' if atom.kind is Kind.BUFFER else state}"
            assert torch.equal(checkpoint.read(atom.name, state), truth[key]), key
            seen += 1
    assert seen == len([key for key in truth if not key.endswith("/model")])


@pytest.mark.parametrize("pair", [own for own in UNLIKE if own.vocabulary], ids=str)
def test_no_row_of_the_vocabulary_depends_on_the_padding(pair: Pair, found: Found) -> None:
    """Runs of other padding trained the same rows: what Megatron holds of one is what it holds of the other."""
    others = [own for own in found.made.glob(f"{pair.model}-*.safetensors") if own.name != pair.truth]
    own = load_file(found.made / pair.truth)
    assert own[_ENDS[0] + "weight"].shape[0] == pair.rows(pair.src) > pair.vocabulary
    for path in others:
        held = load_file(path)
        for key in [key for key in held if key.startswith(_ENDS)]:
            assert torch.equal(held[key][: pair.vocabulary], own[key][: pair.vocabulary]), (path.name, key)


@pytest.mark.parametrize("pair", UNLIKE, ids=str)
def test_files_of_ranks_are_not_written_for_other_padding(pair: Pair, found: Found, tmp_path: Path) -> None:
    """Megatron loads them with exactly the rows that they hold."""
    with pytest.raises(ucp.errors.TopologyError, match=f"padded_vocab_size={pair.rows(pair.dst)}, "):
        ucp.convert(
            found.made / pair.source("torch-zero") / "checkpoint",
            tmp_path / "out",
            to="megatron",
            topology=pair.topology,
            layout="torch",
            settings={"padded_vocab_size": pair.rows(pair.dst)},
            workers=1,
        )


def test_files_of_ranks_are_not_written_where_ranks_overwrite_one_another(found: Found, tmp_path: Path) -> None:
    source = found.made / OVERWRITTEN.source("torch-zero") / "checkpoint"
    with pytest.raises(ucp.errors.TopologyError, match=r"several ranks .*--layout torch_dist"):
        ucp.convert(source, tmp_path / "out", to="megatron", topology=OVERWRITTEN.topology, layout="torch", workers=1)


def _section(outcome: Found) -> str:
    rows = [
        (str(pair.vocabulary or "8 experts"), pair.src.upper(), pair.dst.upper(), _rows(pair), _told(pair, outcome))
        for pair in PAIRS
    ]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return _SECTION.format(maker=MAKER, loader=LOADER, lines="\n".join(lines))


def _rows(pair: Pair) -> str:
    src, dst = pair.rows(pair.src), pair.rows(pair.dst)
    return "-" if not src else f"{src:,}" if src == dst else f"{src:,} to {dst:,}"


def _told(pair: Pair, outcome: Found) -> str:
    own = [outcome.loaded[pair.name(kind)] for kind in KINDS if (pair, kind) in CELLS]
    if all(load.exact for load in own):
        return f"exact, {len(own)} x {own[0].tensors}"
    return "**differs**"


_SECTION = """## Megatron: eight ranks, and vocabularies that do not divide

The pairs of layouts and the vocabularies are those of Megatron's own unit tests. megatron-core {maker} trained and
saved the sources; {loader} loaded what `ucp` wrote. Every run pads the vocabulary to a multiple of 128 x tp rows.
"exact": weights, masters and moments are bit for bit those of the source, and added rows are zeros. `ucp` also read
from every source what its ranks held. The first load of a row is torch_dist, written from `dp_reshardable`. If both
runs pad to the same rows, the second is legacy files, written from legacy files; otherwise `ucp` refuses to write
these.

| vocabulary | from | to | rows | what Megatron holds |
|---|---|---|---|---|
{lines}
"""
