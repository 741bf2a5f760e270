"""Reports as text, as HTML, and as the command line prints them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

import ucp
from ucp.core.text.page import Report
from ucp.core.text.units import nbytes_text, seconds_text
from ucp_cli.verbs import cli

ZERO1 = {"to": "deepspeed", "topology": "dp=2,zero=1", "exclude": ["counter"]}
"""Asked of `source`, whose counter no optimizer group has."""


def test_a_plan_is_readable(source):
    report = ucp.plan(source, **ZERO1, dtypes={"exp_avg": "bfloat16"}, memory=64 << 20, workers=1)
    source_rows, rows, *lists = report.page()
    assert dict(source_rows.rows)["checkpoint"] == str(source)
    assert dict(rows.rows)["to"] == "deepspeed dp=2,zero=1"
    both = f"{nbytes_text(report.nbytes)} to read, {nbytes_text(report.nbytes_written)} to write"
    assert dict(rows.rows)["tensors"] == f"{both}, of 5 parameters"
    assert dict(rows.rows)["files"] == f"{len(report.files)} files of {nbytes_text(report.nbytes_out)}, and the index"
    assert dict(rows.rows)["work"].startswith("1 task by 1 worker of ")
    titles = ["Warnings", "Layout of the target", "Casts", "Left behind"]
    assert [section.title for section in lists if section.rows] == titles
    assert "\n\nCasts\n  - exp_avg: float32 -> bfloat16" in str(report)
    assert len(repr(report)) < 2000, "neither the index nor the files are in it"


def test_references_are_not_called_bytes_to_read(source):
    report = ucp.plan(source, virtual=True)
    assert report.nbytes_read == 0
    assert f"of 6 parameters: {report.references} references into the source, nothing copied\n" in str(report)
    assert "what the tensors compress to" in str(ucp.plan(source, compress=True))


def test_a_conversion_is_readable(source, tmp_path):
    asked = {"dtypes": {"exp_avg": "bfloat16"}, "workers": 1}
    done = ucp.convert(source, tmp_path / "out", **asked, verify=True)
    rows, *lists = done.page()
    assert dict(rows.rows)["wrote"] == f"{tmp_path / 'out'} (ucp)"
    amount = f"{nbytes_text(done.nbytes_written)} written, of 6 parameters, in {seconds_text(done.seconds)}"
    assert dict(rows.rows)["tensors"] == f"{amount} (with --verify)"
    assert dict(rows.rows)["verified"] == "read back and equal to the source"
    casts = next(section for section in lists if section.title == "Casts")
    assert casts.rows[0][0].startswith("exp_avg: float32 -> bfloat16")
    again = ucp.convert(source, tmp_path / "out", **asked, resume=True, verify=True)
    assert not again.verified
    rows, *_ = again.page()
    as_recorded = "nothing was written: files and sizes are as recorded; `ucp verify` reads them"
    assert rows.rows == (("complete", f"{tmp_path / 'out'} (ucp)"), ("", as_recorded))
    assert "references into the source, of 6 param" in str(ucp.convert(source, tmp_path / "v", virtual=True))


def test_a_comparison_is_readable(source, tmp_path):
    ucp.convert(source, tmp_path / "out", dtypes={"exp_avg": "bfloat16"}, workers=1)
    result = ucp.diff(source, tmp_path / "out")
    amount = f"{result.compared} states of {nbytes_text(result.nbytes_compared)} compared"
    assert str(result).startswith(f"{len(result.changes)} differences; {amount}\n")
    assert re.search(r"\n  embed +exp_avg +dtype +float32 +bfloat16\n", str(result))
    assert str(ucp.diff(source, source)).startswith("equal; ")
    same = str(ucp.verify(source, against=source)).splitlines()
    assert same[0] == f"{source}: complete and undamaged"
    assert f"equal to  {source}" in same


def test_damage_prints_with_the_report(source, tmp_path):
    ucp.convert(source, tmp_path / "out", workers=1)
    pack = next((tmp_path / "out" / "packs").iterdir())
    pack.write_bytes(pack.read_bytes()[:-8] + bytes(8))
    report = ucp.verify(tmp_path / "out", against=source)
    first, *rest = str(report).splitlines()
    assert first == f"{tmp_path / 'out'}: damaged"
    at = rest.index("Damage")
    assert rest[at + 1 : at + 1 + len(report.problems)] == [f"  - {line}" for line in report.problems]
    assert f"not compared with  {source}" in rest


def test_the_command_line_prints_the_same_page(source, tmp_path):
    ucp.convert(source, tmp_path / "out", dtypes={"exp_avg": "bfloat16"}, workers=1)
    again = ucp.convert(source, tmp_path / "out", dtypes={"exp_avg": "bfloat16"}, workers=1, resume=True)
    asked = ("--dtype", "exp_avg=bfloat16", "--workers", "1", "--resume")
    pages = {
        ("plan", source, "--to", "deepspeed", "--topology", "dp=2,zero=1", "--exclude", "counter"): ucp.plan(
            source, **ZERO1
        ),
        ("verify", tmp_path / "out", "--against", source): ucp.verify(tmp_path / "out", against=source),
        ("diff", source, tmp_path / "out"): ucp.diff(source, tmp_path / "out"),
        ("convert", source, tmp_path / "out", *asked): again,
    }
    for words, report in pages.items():
        outcome = CliRunner().invoke(cli, list(map(str, words)))
        assert outcome.stdout == f"{report}\n", words


class TestPagesOfStrangeNames:
    """What a checkpoint holds cannot be markup in a notebook, nor control a terminal."""

    @pytest.fixture
    def strange(self, tmp_path):
        for number, name in enumerate(("<b>a</b>", "<b>b</b>\x1b[2J")):
            torch.save({name: torch.ones(2), "c": torch.ones(2)}, tmp_path / f"{number}.pt")
        return tmp_path / "0.pt", tmp_path / "1.pt"

    @staticmethod
    def is_escaped(report):
        assert "\x1b" not in report._repr_html_() + str(report)
        assert "<b>" not in report._repr_html_()
        return "&lt;b&gt;" in report._repr_html_()

    def test_of_a_diff(self, strange):
        assert self.is_escaped(ucp.diff(*strange))
        assert "<table>" in ucp.diff(*strange)._repr_html_()

    def test_of_a_verification(self, strange):
        assert self.is_escaped(ucp.verify(strange[1], against=strange[0]))

    def test_of_a_plan_and_a_conversion(self, strange, tmp_path):
        assert not self.is_escaped(ucp.plan(strange[1]))
        assert self.is_escaped(ucp.convert(strange[1], tmp_path / "<b>"))

    def test_of_a_checkpoint_and_its_index(self, strange):
        assert self.is_escaped(ucp.open(strange[1]))
        assert not self.is_escaped(ucp.inspect(strange[1]))

    def test_of_a_load(self, strange):
        model = torch.nn.ParameterDict({"c": torch.zeros(2)})
        report = ucp.load_into(model, checkpoint=strange[1], strict=False)
        assert self.is_escaped(report)
        assert "\nUnexpected\n  - <b>b</b>" in str(report)


def test_an_index_prints_the_head_of_ucp_inspect(source):
    index = ucp.inspect(source)
    rows = dict(next(iter(index.page())).rows)
    assert list(rows)[:6] == ["checkpoint", "format", "producer", "topology", "step", "parameters"]
    assert CliRunner().invoke(cli, ["inspect", str(source)]).stdout.startswith(str(index).partition("\n\nNotes")[0])
    assert repr(index) == f"<ucp checkpoint {source}: 6 parameters, {index.topology}, step {index.step}>"
    atom = next(iter(index.atoms.values()))
    states = {**atom.states, "weight": replace(atom.states["weight"], fragments=())}
    holed = replace(index, atoms={**index.atoms, atom.name: replace(atom, states=states)})
    assert "complete    NO: see Missing" in str(holed)
    assert f"{atom.name}/weight" in str(holed).partition("\nMissing\n")[2]


def test_every_public_report_shows_itself_in_a_notebook():
    named = [name for name in ucp.__all__ if name.endswith("Report") or name in ("Checkpoint", "Placement", "Stream")]
    assert len(named) > 10
    assert [name for name in named if not issubclass(getattr(ucp, name), Report)] == []


def test_a_table_is_aligned_and_has_headings_in_a_notebook(source):
    html = ucp.inspect(source)._repr_html_()
    assert '<th scope="row" style="text-align:left">checkpoint</th>' in html
    assert '<th scope="col" style="text-align:left">state</th>' in html
    assert re.search(r'<td style="text-align:right">[0-9,]+</td>', html)
