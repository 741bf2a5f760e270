"""What a program that configures logging gets to know, and that another one sees nothing."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import ucp
from tests.unit.live.threads import run
from ucp.core.text.page import Page, Report, facts, lines, table
from ucp.log import LOGGER, LoggedObserver, log_report

ZERO3 = Path(__file__).parents[4] / "fixtures" / "deepspeed" / "z3-dp4-bf16" / "checkpoint"


@dataclass(frozen=True)
class Told(Report):
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def page(self) -> Page:
        yield facts([("wrote", "dst")])
        yield "a line"
        yield table("Parameters", ("name",), [("a",)], most=1, all_in="")
        yield lines("Warnings", self.warnings)
        yield lines("Notes", self.notes)


class Steps:
    """An observer that keeps what it gets."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def begin(self, *, title: str, nbytes: int) -> None:
        self.calls.append((title, nbytes))

    def advance(self, nbytes: int) -> None:
        self.calls.append(nbytes)

    def end(self) -> None:
        self.calls.append("end")


def records(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(level, text) for name, level, text in caplog.record_tuples if name == "ucp"]


def test_the_library_brings_no_output():
    assert [type(handler) for handler in LOGGER.handlers] == [logging.NullHandler]
    assert LOGGER.level == logging.NOTSET
    script = "import ucp; from ucp.log import LOGGER; LOGGER.warning('damage')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""


def test_lists_of_a_report_are_logged_by_what_they_mean(caplog):
    caplog.set_level(logging.INFO, "ucp")
    log_report(Told(notes=("copied\x1b[2J",), warnings=("odd",)))
    assert records(caplog) == [(logging.WARNING, "Warnings: odd"), (logging.INFO, "Notes: copied\\x1b[2J")]


def test_other_ranks_log_warnings_only(caplog):
    caplog.set_level(logging.INFO, "ucp")
    log_report(Told(notes=("copied",), warnings=("odd",)), rank=3)
    assert records(caplog) == [(logging.WARNING, "Warnings: odd")]


def test_a_long_list_is_counted(caplog):
    log_report(Told(warnings=tuple(map(str, range(1025)))))
    texts = [text for _, text in records(caplog)]
    assert len(texts) == 21
    assert texts[-2:] == ["Warnings: 19", "Warnings: 1,005 more"]


def test_stages_are_logged_and_passed_on(caplog):
    caplog.set_level(logging.INFO, "ucp")
    steps = Steps()
    observer = LoggedObserver(steps)
    observer.begin(title="convert", nbytes=2048)
    observer.advance(2048)
    observer.end()
    assert steps.calls == [("convert", 2048), 2048, "end"]
    assert records(caplog)[0] == (logging.INFO, "convert: 2.00 KiB")
    assert records(caplog)[1][1].startswith("convert: done in ")


def test_a_conversion_and_its_proof_are_logged(caplog, tmp_path):
    caplog.set_level(logging.INFO, "ucp")
    report = ucp.convert(ZERO3, tmp_path / "written", to="torch")
    texts = [text for _, text in records(caplog)]
    assert any(text.startswith("convert: ") for text in texts)
    assert {f"Left behind: {line}" for line in report.dropped} <= {*texts}
    assert {f"Notes: {line}" for line in report.notes} <= {*texts}
    assert report.notes
    assert report.dropped
    caplog.clear()
    ucp.verify(tmp_path / "written")
    assert any(text.startswith("checksums: done") for _, text in records(caplog))


def test_what_a_load_left_out_is_a_warning_and_its_notes_are_told_once(caplog, tmp_path):
    torch.save({"model": {"weight": torch.ones(2, 2)}}, tmp_path / "saved.pt")
    caplog.set_level(logging.INFO, "ucp")
    run(2, lambda ranks: ucp.load_into(nn.Linear(2, 2), tmp_path / "saved.pt", strict=False, process_group=ranks))
    told = records(caplog)
    missing = [text for level, text in told if level == logging.WARNING]
    assert len(missing) == 2
    assert all("bias" in text for text in missing)
    assert [text for _, text in told if text.startswith("load: done")] != []
    assert len({text for level, text in told if level == logging.INFO}) == len(
        [text for level, text in told if level == logging.INFO]
    )


def test_a_save_is_logged(caplog, tmp_path):
    caplog.set_level(logging.INFO, "ucp")
    ucp.save(nn.Linear(2, 2), False, None, tmp_path / "store", step=7)
    assert (logging.INFO, f"save: {tmp_path / 'store'}, step 7") in records(caplog)
