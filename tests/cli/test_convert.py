"""`ucp convert` end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.cli.conftest import Run

KEYS = {
    "schema",
    "dst",
    "format",
    "to",
    "topology",
    "layout",
    "atoms",
    "nbytes_written",
    "resumed_bytes",
    "already_complete",
    "checked_bytes",
    "unchecked_files",
    "copies_checked",
    "casts",
    "notes",
    "dropped",
    "seconds",
    "verified",
}


def test_the_summary_says_what_was_done(ucp: Run, zero3: Path, tmp_path: Path) -> None:
    result = ucp("convert", zero3, tmp_path / "out", "--verify")
    facts = dict(line.split(maxsplit=1) for line in result.stdout.split("\n\n")[0].splitlines())
    assert facts["wrote"] == f"{tmp_path / 'out'} (ucp)"
    assert "written in" in facts["holds"]
    assert "against checksums" in facts["checked"]
    assert facts["verified"] == "read back and equal to the source"
    assert result.stderr == ""


def test_json_has_the_keys_of_its_schema(ucp: Run, zero3: Path, tmp_path: Path) -> None:
    document = json.loads(ucp("convert", zero3, tmp_path / "out", "--json").stdout)
    assert document["schema"] == "ucp.convert/1"
    assert set(document) >= KEYS
    assert document["verified"] is False


def test_quiet_says_nothing(ucp: Run, zero3: Path, tmp_path: Path) -> None:
    result = ucp("convert", zero3, tmp_path / "out", "-q")
    assert (result.stdout, result.stderr) == ("", "")


def test_quiet_leaves_the_progress_that_is_asked_for(ucp: Run, zero3: Path, tmp_path: Path) -> None:
    result = ucp("convert", zero3, tmp_path / "out", "-q", "--progress", "json")
    assert result.stdout == ""
    assert json.loads(result.stderr.splitlines()[0])["event"] == "begin"


def test_progress_goes_to_stderr_as_json(ucp: Run, zero3: Path, tmp_path: Path) -> None:
    result = ucp("convert", zero3, tmp_path / "out", "--progress", "json", "--json")
    assert json.loads(result.stdout)["to"] == "ucp"
    events = [json.loads(line) for line in result.stderr.splitlines()]
    assert [event["event"] for event in events if event["title"] == "convert"][:: len(events) - 1] == ["begin", "end"]
    assert events[-1]["done_bytes"] == events[-1]["total_bytes"] > 0


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--layout", "per-parameter"],
        ["--virtual"],
        ["--compress"],
        ["--to", "deepspeed-universal"],
        ["--to", "deepspeed", "--topology", "dp=2,zero=1"],
        ["--to", "deepspeed", "--topology", "dp=3,zero=3"],
    ],
)
def test_whatever_is_written_is_equal_to_the_source(ucp: Run, zero3: Path, tmp_path: Path, words: list[str]) -> None:
    ucp("convert", zero3, tmp_path / "out", *words)
    assert "whole and undamaged" in ucp("verify", tmp_path / "out", "--against", zero3).stdout


@pytest.mark.parametrize(
    ("words", "said", "topology"),
    [
        (["--virtual"], "(ucp, virtual)", None),
        (["--compress"], "(ucp, compressed)", None),
        (["--to", "deepspeed", "--topology", "dp=2,zero=1"], "(deepspeed, dp=2,zero=1)", (2, 1)),
        (["--to", "deepspeed"], "(deepspeed, dp=4,zero=3)", (4, 3)),
        (["--to", "deepspeed-universal"], "(deepspeed-universal)", None),
    ],
)
def test_the_layout_that_was_written_is_said(
    ucp: Run, zero3: Path, tmp_path: Path, words: list[str], said: str, topology: tuple[int, int] | None
) -> None:
    page = ucp("convert", zero3, tmp_path / "out", *words).stdout
    assert page.splitlines()[0].split(maxsplit=1) == ["wrote", f"{tmp_path / 'out'} {said}"]
    document = json.loads(ucp("convert", zero3, tmp_path / "out", *words, "--resume", "--json").stdout)
    assert document["already_complete"] is True
    assert document["layout"] in {"", "virtual", "compressed"}
    found = document["topology"]
    assert (found and (found["dp"], found["zero"])) == topology


def test_a_finished_conversion_of_another_kind_is_told_apart(ucp: Run, zero3: Path, mixed: Path, atoms: Path) -> None:
    target = ucp("convert", zero3, atoms, "--resume", "--to", "deepspeed", code=1).stderr
    assert "is a finished conversion, made differently" in target
    assert "target: ucp there, deepspeed asked for" in target
    assert "--overwrite" in target
    source = ucp("convert", mixed, atoms, "--resume", code=1).stderr
    assert f"source: {zero3.resolve() / 'global_step3'} there, {mixed.resolve() / 'global_step3'} asked for" in source


@pytest.mark.parametrize("words", [[], ["--virtual"], ["--to", "deepspeed"], ["--to", "deepspeed-universal"]])
def test_there_is_room_beside_a_tag_folder_but_not_in_it(ucp: Run, copy: Path, words: list[str]) -> None:
    """What lies in the folder that was saved to does not confuse readers, with `latest` or without."""
    before = json.loads(ucp("inspect", copy, "--json").stdout)
    ucp("convert", copy / "global_step3", copy / "other", *words)
    assert json.loads(ucp("inspect", copy, "--json").stdout) == before
    (copy / "latest").unlink()
    assert json.loads(ucp("inspect", copy, "--json").stdout)["path"] == before["path"]


def test_a_destination_in_what_the_source_resolves_to_is_refused(ucp: Run, atoms: Path) -> None:
    assert "lies inside the source" in ucp("convert", atoms / "ucp.json", atoms / "copy", code=1).stderr
    assert not (atoms / "copy").exists()


def test_include_and_dtype(ucp: Run, zero3: Path, tmp_path: Path) -> None:
    result = ucp("convert", zero3, tmp_path / "out", "--include", "l1.*/weight", "--dtype", "weight=bf16", "--verify")
    assert "float32 -> bfloat16" in result.stdout
    (pack,) = (tmp_path / "out" / "packs").iterdir()
    with safe_open(pack, "np") as file:
        assert sorted(file.keys()) == ["l1.bias/weight", "l1.weight/weight"]


def test_a_destination_that_is_there_is_not_touched(ucp: Run, zero3: Path, atoms: Path) -> None:
    assert "--overwrite" in ucp("convert", zero3, atoms, code=1).stderr
    ucp("convert", zero3, atoms, "--overwrite")
    assert "was complete already" in ucp("convert", zero3, atoms, "--resume").stdout


def test_the_source_as_destination_is_refused(ucp: Run, copy: Path) -> None:
    assert "lies inside" in ucp("convert", copy, copy / "atoms", code=1).stderr


def test_an_interrupt_says_how_to_go_on(ucp: Run, zero3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*words: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ucp.api.carry_out", stop)
    assert "--resume" in ucp("convert", zero3, tmp_path / "out", code=130).stderr


def test_a_flipped_byte_is_named(ucp: Run, copy: Path, tmp_path: Path) -> None:
    place = json.loads(ucp("inspect", copy, "--json", "--param", "l1.weight").stdout)
    piece = place["atoms"]["l1.weight"]["states"]["exp_avg"]["pieces"][0]
    with open(piece["path"], "r+b") as file:
        file.seek(piece["offset"])
        byte = file.read(1)
        file.seek(piece["offset"])
        file.write(bytes([byte[0] ^ 1]))
    result = ucp("convert", copy, tmp_path / "out", code=1)
    assert "l1.weight/exp_avg" in result.stderr
    assert not (tmp_path / "out").exists()
