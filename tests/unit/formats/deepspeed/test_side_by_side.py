"""Reading in several processes gives what reading in one does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ucp_formats.deepspeed.read import files
from ucp_formats.deepspeed.read.files import read_side_by_side
from ucp_formats.deepspeed.read.source import DeepSpeedFormat

from tests.bench.scale.deepspeed import expert_groups, write_expert_run
from tests.bench.scale.moe import Moe
from ucp.errors import UcpError


@pytest.fixture
def two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_workers", lambda: 2)


def read(item: int) -> tuple[int, int]:
    time.sleep(0.002)  # so that no process does all
    return item, os.getpid()


@pytest.mark.usefixtures("two_workers")
def test_values_come_in_order_from_other_processes() -> None:
    found = list(read_side_by_side(read, range(100), least=1))
    assert [item for item, _ in found] == [*range(100)]
    assert len({process for _, process in found}) == 2
    assert os.getpid() not in {process for _, process in found}


@pytest.mark.usefixtures("two_workers")
def test_few_are_read_here() -> None:
    assert {process for _, process in read_side_by_side(read, range(10), least=11)} == {os.getpid()}


def unsendable(item: int) -> Callable[[], int]:
    return lambda: item


def fails(item: int) -> int:
    if item == 70:
        raise ValueError("the seventieth")
    return item


def dies(item: int) -> int:
    if item == 40 and os.getpid() != PARENT:
        os._exit(9)
    return item


PARENT = os.getpid()


@pytest.mark.usefixtures("two_workers")
def test_what_a_process_cannot_do_is_done_here() -> None:
    assert [value() for value in read_side_by_side(unsendable, range(50), least=1)] == [*range(50)]
    assert [*read_side_by_side(dies, range(100), least=1)] == [*range(100)]
    with pytest.raises(ValueError, match="the seventieth"):
        list(read_side_by_side(fails, range(100), least=1))


@pytest.mark.usefixtures("two_workers")
def test_leaving_early_leaves_no_process() -> None:
    values = read_side_by_side(read, range(1000), least=1)
    _, process = next(values)
    values.close()  # type: ignore[attr-defined]  # it is a generator
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.usefixtures("two_workers")
def test_indexes_and_errors_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moe = Moe(layers=2, experts=40, hidden=64, ffn=32, head=16, groups=1, vocabulary=128)
    dense, starts, own, run = expert_groups(moe, ranks=8, ep=8)
    write_expert_run(tmp_path / "made", dense=dense, experts=starts, own=own, run=run)
    here = DeepSpeedFormat().read(tmp_path / "made")
    monkeypatch.setattr(read_side_by_side, "__kwdefaults__", {"least": 1})
    assert DeepSpeedFormat().read(tmp_path / "made") == here
    tag = tmp_path / "made" / "global_step3"
    (tag / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").write_bytes(b"damaged")
    (tag / "layer_1_expert_7_mp_rank_00_model_states.pt").unlink()
    texts = []
    for least in (1, 1000):
        monkeypatch.setattr(read_side_by_side, "__kwdefaults__", {"least": least})
        with pytest.raises(UcpError) as caught:
            DeepSpeedFormat().read(tmp_path / "made")
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert "rank_2_mp_rank_00" in texts[0]
