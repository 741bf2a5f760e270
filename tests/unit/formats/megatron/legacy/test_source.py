"""Legacy checkpoints, cut from known tensors, read back bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ucp_formats.megatron.source import MegatronFormat

from tests.golden.truth import check_copies, read_states
from tests.unit.formats.megatron.conftest import FakeLegacy
from ucp.core.index import Kind

LAYOUTS = [
    {"kind": "gpt"},
    {"kind": "gpt", "tp": 2, "pp": 2},
    {"kind": "gpt", "tp": 2, "pp": 2, "tied": True},
    {"kind": "gpt", "tied": True},
    {"kind": "gpt", "pp": 2, "per_layer": (1, 3)},
    {"kind": "llama", "tp": 4},
    {"kind": "llama", "tp": 2, "pp": 2, "vpp": 2},
    {"kind": "mixtral", "ep": 2},
    {"kind": "mixtral", "tp": 2, "ep": 2, "dp": 2},
    {"kind": "mixtral", "tp": 2, "ep": 2, "etp": 1, "dp": 1},
    {"kind": "mixtral", "tp": 2, "pp": 2, "ep": 2, "etp": 1, "dp": 2},
    {"kind": "mixtral", "tp": 4, "ep": 2, "etp": 1, "dp": 1},
    {"kind": "mixtral", "ep": 4, "dp": 4, "pp": 2},
]
OPTIMIZERS = [
    {"optimizer": "none"},
    {"optimizer": "fp32"},
    {"optimizer": "whole"},
    {"optimizer": "L1"},
    {"optimizer": "L2"},
    {"optimizer": "L2", "bucket": 100},
    {"optimizer": "L3"},
    {"optimizer": "L3", "bucket": 100},
    {"optimizer": "L3a"},
    {"optimizer": "L3a", "bucket": 100},
]


def shown(options: dict[str, object]) -> str:
    return ",".join(f"{key}={value}" for key, value in options.items())


CELLS = [(layout, optimizer) for layout in LAYOUTS for optimizer in OPTIMIZERS]
"""Every layout with every optimizer: tests/integration/megatron/matrix/test_megatron_legacy_cells.py reads them all."""
SOME = [(layout, OPTIMIZERS[number % len(OPTIMIZERS)]) for number, layout in enumerate(LAYOUTS)]
"""Each layout with an optimizer, and each optimizer with a layout."""


@pytest.mark.parametrize(("layout", "optimizer"), SOME, ids=shown)
def test_every_state_is_what_was_cut(tmp_path: Path, layout, optimizer) -> None:
    check_what_was_cut(FakeLegacy(**layout, **optimizer), tmp_path)


def check_what_was_cut(run: FakeLegacy, tmp_path: Path) -> None:
    """The run's files hold its tensors, bit for bit."""
    index = MegatronFormat().read(run.save(tmp_path))
    found = read_states(index)
    check_copies(index)
    assert set(index.atoms) == set(run.masters)
    has_states = run.optimizer != "none"
    for name, atom in index.atoms.items():
        assert atom.kind is Kind.PARAMETER
        for state in ("weight", "exp_avg", "exp_avg_sq") if has_states else ("weight",):
            assert torch.equal(found[f"{name}/{state}"].float(), run.expected(name, state)), (name, state)
        assert ("step" in atom.states) == has_states
    assert [len(group.params) > 0 for group in index.groups].count(True) == (
        0 if not has_states else 4 - (run.kind == "mixtral") if run.ep > 1 else 2
    )
    assert index.step == 10
    assert index.aliases == ({"output_layer.weight": "embedding.word_embeddings.weight"} if run.tied else {})


STYLES = [
    {"style": "te", "kind": "llama", "tp": 2},
    {"style": "te", "kind": "mixtral", "ep": 2, "tp": 2},
    {"style": "grouped", "kind": "mixtral"},
    {"style": "grouped", "kind": "mixtral", "ep": 2, "pp": 2},
    {"style": "grouped", "kind": "mixtral", "tp": 2, "ep": 2, "etp": 2},
    {"style": "legacy", "kind": "gpt", "tp": 2, "version": 3.0},
    {"style": "legacy", "kind": "gpt", "tp": 2, "pp": 2, "tied": True},
]


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [(layout, ("whole", "L1", "L3a")[number % 3]) for number, layout in enumerate(STYLES)],
    ids=lambda own: own if isinstance(own, str) else shown(own),
)
def test_other_module_classes_give_the_same(fake_legacy, tmp_path: Path, layout, optimizer) -> None:
    run = fake_legacy(**layout, optimizer=optimizer)
    index = MegatronFormat().read(run.save(tmp_path))
    found = read_states(index)
    check_copies(index)
    wanted = {f"{name}/{state}" for name in run.masters for state in ("weight", "exp_avg", "exp_avg_sq")}
    assert {name for name in found if not name.endswith("/step")} == wanted
    assert all(torch.equal(found[name], run.expected(*name.rsplit("/", 1))) for name in wanted)
