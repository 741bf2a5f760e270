"""A pattern of a package that nobody here knows cuts a real checkpoint, joins it again, and is loaded.

The package (block-cyclic rows, as ScaLAPACK deals them out) is installed as any other: a folder on the path, and the
metadata that names its entry point. A process of its own finds it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

FIXTURE = Path(__file__).parents[3] / "fixtures" / "megatron" / "gpt-tp2-pp2-torch" / "checkpoint"
PACKAGE = dedent('''
    """Rows dealt to the parts in blocks, like cards."""

    from dataclasses import dataclass

    from ucp.core.layout import Overlap
    from ucp.core.region import Box, RegionPair


    @dataclass(frozen=True)
    class BlockCyclic:
        rows: int
        overlap: Overlap = Overlap.EXCLUSIVE

        @property
        def name(self):
            return f"block-cyclic(rows={self.rows})"

        def regions(self, global_shape, parts, index):
            rest, pairs, local = global_shape[1:], [], 0
            zeros = (0,) * len(rest)
            for start in range(index * self.rows, global_shape[0], parts * self.rows):
                sizes = (min(self.rows, global_shape[0] - start), *rest)
                pairs.append(RegionPair(Box((start, *zeros), sizes), Box((local, *zeros), sizes)))
                local += sizes[0]
            nothing = Box((0, *zeros), (0, *rest))
            return tuple(pairs) or (RegionPair(nothing, nothing),)

        def whole_shape(self, local_shapes):
            whole = (sum(shape[0] for shape in local_shapes), *local_shapes[0][1:])
            held = [self.regions(whole, len(local_shapes), index) for index in range(len(local_shapes))]
            rows = [sum(pair.local.sizes[0] for pair in pairs) for pairs in held]
            if rows != [shape[0] for shape in local_shapes]:
                raise ValueError(f"expected parts of {rows} rows; got {local_shapes}")
            return whole
    ''')
RULES = """
name = "gpt-cyclic"
title = "GPT, with the first projection dealt out in blocks of rows"
extends = ["gpt"]

[[rule]]
name = "decoder.layers.{layer}.mlp.linear_fc1.weight"
tp = { pattern = "block-cyclic", rows = 7 }
meaning = "rows in blocks of seven"
"""
PARAM = "decoder.layers.1.mlp.linear_fc1.weight"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with the installed package, and the rules that use it."""
    info = tmp_path / "site" / "cyclic-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cyclic\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ucp.patterns]\nblock-cyclic = cyclic:BlockCyclic\n")
    (tmp_path / "site" / "cyclic.py").write_text(PACKAGE)
    (tmp_path / "rules.toml").write_text(RULES)
    return tmp_path


def run(work: Path, script: str) -> None:
    """Run Python that finds the package."""
    path = os.pathsep.join(filter(None, (str(work / "site"), os.environ.get("PYTHONPATH", ""))))
    prelude = f"import ucp, torch\nfrom pathlib import Path\nwork = Path({str(work)!r})\nsource = {str(FIXTURE)!r}\n"
    prelude += f"rules, param = work / 'rules.toml', {PARAM!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", prelude + dedent(script)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_is_cut_joined_and_loaded(work: Path) -> None:
    run(
        work,
        """
        ucp.convert(source, work / "atoms")
        ucp.convert(work / "atoms", work / "cut", to="megatron", layout="torch", topology="tp=2", patterns=rules)
        before, cut = ucp.open(source), ucp.open(work / "cut", patterns=rules)
        whole = before.read(param, "exp_avg")
        rows = {}
        for piece in cut.index.atoms[param].states["exp_avg"].fragments:
            rows.setdefault(Path(piece.path).parent.name, []).append((piece.box.offsets[0], piece.box.stops[0]))
        assert rows == {"mp_rank_00": [(0, 7), (14, 21)], "mp_rank_01": [(7, 14), (21, 28)]}, rows
        assert cut.index.atoms[param].patterns["tp"] == "block-cyclic(rows=7)"
        assert torch.equal(cut.read(param, "exp_avg"), whole)
        plain = ucp.open(work / "cut").read(param, "exp_avg")
        assert not torch.equal(plain, whole), "read as plain rows, it comes out in another order"
        changes = ucp.diff(work / "atoms", work / "cut", patterns=rules).changes
        assert {change.state for change in changes} <= {"step"}, "Megatron counts steps in another type"

        model = torch.nn.Module()
        for name, atom in cut.atoms.items():
            *path, last = name.split(".")
            own = model
            for part in path:
                own = getattr(own, part, None) or own.register_module(part, torch.nn.Module()) or getattr(own, part)
            own.register_parameter(last, torch.nn.Parameter(torch.zeros(atom.global_shape)))
        ucp.load_into(model, checkpoint=work / "cut", patterns=rules)
        for name, live in model.named_parameters():
            assert torch.equal(live.detach(), before.read(name, "weight").float()), name
        """,
    )
