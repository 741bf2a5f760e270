"""What is told of a run, and how often."""

from __future__ import annotations

import json
import threading

import pytest

from ucp_cli import progress
from ucp_cli.progress import Watch, watch


class Shown:
    """Remembers what it is asked to draw."""

    def __init__(self) -> None:
        self.said: list[tuple[object, ...]] = []

    def start(self, title: str, total: int) -> None:
        self.said.append(("start", title, total))

    def update(self, done: int, seconds: float) -> None:
        self.said.append(("update", done, seconds))

    def stop(self, done: int, seconds: float) -> None:
        self.said.append(("stop", done, seconds))


def test_it_draws_at_most_ten_times_a_second() -> None:
    shown, now = Shown(), [100.0]
    own = Watch(shown, lambda: now[0])
    own.begin(title="convert", nbytes=1000)
    for _ in range(100):
        now[0] += 0.01
        own.advance(10)
    own.end()
    updates = [item for item in shown.said if item[0] == "update"]
    assert 8 <= len(updates) <= 10
    assert shown.said[-1] == ("stop", 1000, pytest.approx(1.0))


@pytest.mark.parametrize("how", ["bar", "log", "json"])
def test_that_another_process_is_waited_for_is_shown(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    observer = watch(how)
    observer.begin(title="waiting for process 1234 on node7", nbytes=0)
    first = capsys.readouterr().err
    assert "waiting for process 1234 on node7" in first
    assert "%" not in first
    observer.end()


def test_several_threads_may_advance() -> None:
    shown = Shown()
    own = Watch(shown)
    own.begin(title="copies", nbytes=4000)
    threads = [threading.Thread(target=lambda: [own.advance(1) for _ in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own.end()
    assert shown.said[-1][:2] == ("stop", 4000)


def test_json_events(capsys: pytest.CaptureFixture[str]) -> None:
    own = watch("json")
    own.begin(title="convert", nbytes=8)
    own.advance(8)
    own.end()
    out, err = capsys.readouterr()
    events = [json.loads(line) for line in err.splitlines()]
    assert out == ""
    assert [event["event"] for event in events] == ["begin", "end"]
    assert {tuple(event) for event in events} == {
        ("event", "title", "done_bytes", "total_bytes", "seconds", "bytes_per_second")
    }
    assert events[-1]["done_bytes"] == events[-1]["total_bytes"] == 8


def test_no_bar_where_there_is_no_terminal_nor_when_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    for own in (watch("auto"), watch("none"), watch("auto", quiet=True), watch("none", quiet=True)):
        own.begin(title="convert", nbytes=8)
        own.advance(8)
        own.end()
    assert capsys.readouterr() == ("", "")


def test_what_is_asked_for_is_shown_when_quiet_too(capsys: pytest.CaptureFixture[str]) -> None:
    own = watch("json", quiet=True)
    own.begin(title="convert", nbytes=8)
    own.end()
    assert [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()] == ["begin", "end"]


def test_the_bar_starts_no_thread(capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    own = watch("bar")
    own.begin(title="convert", nbytes=1 << 30)
    own.advance(1 << 30)
    assert threading.active_count() == before
    own.end()
    assert "1.00 GiB of 1.00 GiB" in capsys.readouterr().err


def test_a_bar_of_nothing_is_not_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    own = watch("bar")
    own.begin(title="copies", nbytes=0)
    own.end()
    assert capsys.readouterr().err == ""


class TestLog:
    def test_a_line_at_every_tenth_and_one_at_the_end(self, capsys) -> None:
        now = [0.0]
        own = Watch(progress._Log(), lambda: now[0])
        own.begin(title="convert", nbytes=1000)
        for _ in range(100):
            now[0] += 0.2
            own.advance(10)
        own.end()
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == "convert: 0%, 0 B of 1000 B"
        assert lines[1] == "convert: 10%, 100 B of 1000 B, 50 B/s, 18.0 s left"
        assert lines[-1] == "convert: done, 1000 B in 20.0 s"
        assert len(lines) == 12

    def test_a_long_stage_says_that_it_goes_on(self, capsys) -> None:
        now = [0.0]
        own = Watch(progress._Log(), lambda: now[0])
        own.begin(title="convert", nbytes=1 << 40)
        for _ in range(10):
            now[0] += 20.0
            own.advance(1 << 20)
        assert len(capsys.readouterr().err.splitlines()) == 6


class TestColumns:
    def test_no_time_to_go_in_the_first_second(self) -> None:
        assert not any("left" in text for text in progress._columns(500, 1000, 0.9))
        assert progress._columns(500, 1000, 2.0)[-1].strip() == "2.00 s left"

    @pytest.mark.parametrize(("width", "count"), [(200, 4), (70, 3), (50, 2), (10, 1)])
    def test_a_narrow_terminal_has_fewer(self, width: int, count: int, monkeypatch) -> None:
        monkeypatch.setattr(progress, "_WIDE", width)
        bar = progress._Bar()
        bar._total = 1 << 30
        assert len(bar._text(1 << 29, 10.0).split("  ")) >= count
        assert "50%" in bar._text(1 << 29, 10.0)
        assert len(bar._text(1 << 29, 10.0)) <= max(width - progress._LEAST_BAR, 5)
