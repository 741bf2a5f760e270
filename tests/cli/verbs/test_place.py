"""`ucp place`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

FIXTURES = Path(__file__).parents[3] / "fixtures"
CLUSTER = ("--gpus", "2", "--slots", "4")


@pytest.fixture
def loads(tmp_path: Path) -> Path:
    path = tmp_path / "loads.json"
    path.write_text(json.dumps({3: [9, 1, 1, 1, 4, 2], 4: [1, 1, 1, 1, 1, 1]}))
    return path


def test_a_placement_is_written_and_its_migration_told(ucp: Run, tmp_path: Path, loads: Path) -> None:
    out = tmp_path / "placement.json"
    page = ucp("place", "--loads", loads, "--nodes", 3, *CLUSTER, "--out", out, "--form", "ascend").stdout
    assert "3 nodes, each with 2 GPUs of 4 slots" in page
    common = ("--nodes", 2, *CLUSTER, "--from", out, "--lost", "1", "--json")
    document = json.loads(ucp("place", "--loads", loads, *common).stdout)
    assert document["schema"] == "ucp.place/1"
    assert document["migration"]["nodes"] == [0, 2]
    assert all(transfer["source"] in (0, 2, None) for transfer in document["migration"]["transfers"])


def test_the_checkpoint_tells_loads_and_bytes(ucp: Run, tmp_path: Path) -> None:
    checkpoint = FIXTURES / "megatron" / "mixtral-pp2-ep2-dp2-dp" / "checkpoint"
    out = tmp_path / "placement"
    page = ucp("place", "--loads", checkpoint, "--nodes", 3, "--slots", 4, "--out", out, "--form", "vllm").stdout
    assert "squared gradients" in page
    command = ("--nodes", 2, "--slots", 4, "--from", out, "--lost", 0, "--checkpoint", checkpoint)
    page = ucp("place", "--loads", checkpoint, *command, "--bandwidth", "1MB").stdout
    assert "busiest node" in page
    assert "time" in page


@pytest.mark.parametrize(
    "options",
    [
        ("--out", "x"),
        ("--form", "vllm"),
        ("--lost", "1"),
        ("--threshold", "4"),
        ("--plot", "x.txt"),
        ("--lost", "a"),
        ("--slots", "0"),
        ("--out", "x.svg", "--form", "vllm", "--plot", "x.svg"),
    ],
)
def test_mistakes_write_nothing(options: tuple[str, ...], ucp: Run, tmp_path: Path, loads: Path) -> None:
    ucp("place", "--loads", loads, "--nodes", 3, *CLUSTER, *options, code=2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["loads.json"]


def test_a_folder_is_no_file_to_write(ucp: Run, tmp_path: Path, loads: Path) -> None:
    for out in (tmp_path, Path(".")):
        ran = ucp("place", "--loads", loads, "--nodes", 3, *CLUSTER, "--form", "vllm", "--out", out, code=1)
        assert isinstance(ran.exception, SystemExit)
    assert [entry.name for entry in tmp_path.iterdir()] == ["loads.json"]


@pytest.mark.parametrize(
    "text",
    [
        "5",
        '{"0": [1, 2], "00": [3, 4]}',
        '{"logical_count": [[]]}',
        f"[[1, {'9' * 400}]]",
        "[[1e308, 1e308]]",
        *(
            f'{{"record_type": "eplb_load_stats", "expert_load": {counts}, "p2l_map": {slots}}}'
            for counts, slots in [('[["x"]]', "[[0]]"), ("[[1, 2], [1]]", "[[0]]"), ('{"a": 1}', "5"), ("[[]]", "[[]]")]
        ),
        "[" * 100_000,
    ],
)
def test_hostile_loads_are_refused(text: str, ucp: Run, tmp_path: Path) -> None:
    path = tmp_path / ("loads.json" if not text.startswith(('{"rec', "[[[")) else "loads.jsonl")
    path.write_text(text)
    code = 1 if text.startswith("[[[") else 2
    assert isinstance(ucp("place", "--loads", path, "--nodes", 2, "--slots", 8, code=code).exception, SystemExit)


@pytest.mark.parametrize("slots", ["[0,,1]", "[0 1]", "[01]", f"[{'9' * 5000}]"])
def test_a_hostile_placement_is_refused(slots: str, ucp: Run, tmp_path: Path, loads: Path) -> None:
    previous = tmp_path / "placement.yaml"
    previous.write_text(f"initial_global_assignments:\n  0: {slots}\n")
    words = ("--nodes", 2, *CLUSTER, "--from", previous)
    assert isinstance(ucp("place", "--loads", loads, *words, code=1).exception, SystemExit)


def test_tasks_share_out_gpus(ucp: Run) -> None:
    document = json.loads(ucp("place", "--tasks", "512:256:128:128", "--gpus", 8, "--json").stdout)
    assert document["schema"] == "ucp.tasks/1"
    assert [len(gpus) for gpus in document["gpus"]] == [4, 2, 1, 1]
    assert "1.00 times" in ucp("place", "--tasks", "1:1:2", "--gpus", 2).stdout


@pytest.mark.parametrize(
    "options",
    [
        ("--tasks", "1:x"),
        ("--tasks", "0:1"),
        ("--tasks", "1:1", "--nodes", "2"),
        ("--tasks", "1:1", "--form", "vllm"),
        (),
    ],
)
def test_mistakes_about_tasks(options: tuple[str, ...], ucp: Run) -> None:
    assert ucp("place", *options, code=2).stderr
