"""`ucp convert` end to end."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType

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
    "nbytes_out",
    "files_out",
    "nbytes_last",
    "files_last",
    "references",
    "resumed_bytes",
    "believed_bytes",
    "read_back_bytes",
    "already_complete",
    "checked_bytes",
    "unchecked_files",
    "copies_checked",
    "warnings",
    "casts",
    "notes",
    "dropped",
    "part",
    "seconds",
    "verified",
}


def test_the_summary_says_what_was_done(ucp: Run, zero3: Path, tmp_path: Path) -> None:
    result = ucp("convert", zero3, tmp_path / "out", "--verify")
    facts = dict(line.split(maxsplit=1) for line in result.stdout.split("\n\n")[0].splitlines())
    assert facts["wrote"] == f"{tmp_path / 'out'} (ucp)"
    assert facts["tensors"].startswith("4.68 KiB written, of 16 parameters, in ")
    assert facts["files"].startswith("7 files of ")
    assert "against checksums" in facts["checked"]
    assert facts["verified"] == "read back and equal to the source"
    assert result.stderr == ""


def test_json_has_the_keys_of_its_schema(ucp: Run, zero3: Path, tmp_path: Path) -> None:
    document = json.loads(ucp("convert", zero3, tmp_path / "out", "--json").stdout)
    assert document["schema"] == "ucp.convert/1"
    assert set(document) >= KEYS
    assert document["verified"] is False


def test_no_fsync_leaves_the_disk_to_the_system(
    ucp: Run, zero3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", synced.append)
    ucp("convert", zero3, tmp_path / "out", "--no-fsync", "--workers", 1)
    assert not synced
    ucp("verify", tmp_path / "out", "--against", zero3)
    ucp("convert", zero3, tmp_path / "waited", "--workers", 1)
    assert synced


def test_quiet_says_nothing(ucp: Run, zero3: Path, tmp_path: Path) -> None:
    result = ucp("convert", zero3, tmp_path / "out", "-q")
    assert (result.stdout, result.stderr) == ("", "")


def test_progress_goes_to_stderr_as_json(ucp: Run, zero3: Path, tmp_path: Path) -> None:
    result = ucp("convert", zero3, tmp_path / "out", "--progress", "json", "--json")
    assert json.loads(result.stdout)["to"] == "ucp"
    events = [json.loads(line) for line in result.stderr.splitlines()]
    assert [event["event"] for event in events if event["title"] == "convert"][:: len(events) - 1] == ["begin", "end"]
    assert events[-1]["done_bytes"] == events[-1]["total_bytes"] > 0


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


@pytest.mark.parametrize("words", [[], ["--virtual"], ["--to", "deepspeed"], ["--to", "deepspeed-universal"]])
def test_there_is_room_beside_a_tag_folder_but_not_in_it(ucp: Run, copy: Path, words: list[str]) -> None:
    """What lies in the folder that was saved to does not confuse readers, with `latest` or without."""
    before = json.loads(ucp("inspect", copy, "--json").stdout)
    ucp("convert", copy / "global_step3", copy / "other", *words)
    assert json.loads(ucp("inspect", copy, "--json").stdout) == before
    (copy / "latest").unlink()
    assert json.loads(ucp("inspect", copy, "--json").stdout)["path"] == before["path"]


def test_include_and_dtype(ucp: Run, zero3: Path, tmp_path: Path) -> None:
    result = ucp("convert", zero3, tmp_path / "out", "--include", "l1.*/weight", "--dtype", "weight=bf16", "--verify")
    assert "float32 -> bfloat16" in result.stdout
    (pack,) = (tmp_path / "out" / "packs").iterdir()
    with safe_open(pack, "np") as file:
        assert sorted(file.keys()) == ["l1.bias/weight", "l1.weight/weight"]


def test_a_destination_that_is_there_is_not_touched(ucp: Run, zero3: Path, atoms: Path) -> None:
    assert "--overwrite" in ucp("convert", zero3, atoms, code=1).stderr
    ucp("convert", zero3, atoms, "--overwrite")
    assert "nothing was written" in ucp("convert", zero3, atoms, "--resume").stdout


def test_a_destination_that_is_not_apart_from_the_source_is_wrong_usage(
    ucp: Run, copy: Path, atoms: Path, tmp_path: Path
) -> None:
    assert "is the source" in ucp("convert", copy, copy, code=2).stderr
    assert "lies inside" in ucp("convert", copy, copy / "atoms", code=2).stderr
    assert "lies inside the destination" in ucp("convert", copy, copy.parent, code=2).stderr
    ucp("convert", atoms, tmp_path / "virtual", "--virtual", "-q")
    assert "refers to" in ucp("convert", tmp_path / "virtual", atoms, "--overwrite", code=2).stderr


def test_an_interrupted_replacement_is_continued_with_both_options(
    ucp: Run, zero3: Path, atoms: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("convert", zero3, atoms, "--layout", "per-parameter", "--overwrite")
    monkeypatch.setattr(EXECUTION, "fill_checksums", stop)
    assert "the same command with --resume continues" in ucp(*words, code=130).stderr
    monkeypatch.undo()
    assert "made differently" in ucp(*words[:-1], "--resume", code=1).stderr
    other = ucp("convert", zero3, atoms, "--overwrite", "--resume", "--compress", code=1).stderr
    assert "Start over with --overwrite, without --resume" in other
    assert json.loads(ucp(*words, "--resume", "--json").stdout)["resumed_bytes"] > 0
    assert (atoms / "ucp.json").exists()
    assert not (atoms / "packs").exists()


CONVERSION = import_module("ucp.conversion.convert")
EXECUTION = import_module("ucp.conversion.destination.disk")
PREPARATION = import_module("ucp.conversion.prepare")


def stop(*words: object, **named: object) -> None:
    """In place of a step: as if Ctrl-C were pressed there."""
    raise KeyboardInterrupt


def test_an_interrupt_says_how_to_go_on(ucp: Run, zero3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EXECUTION, "fill_checksums", stop)
    said = ucp("convert", zero3, tmp_path / "out", code=130).stderr
    assert said == f"Error: interrupted; the same command with --resume continues {tmp_path / 'out'}\n"
    monkeypatch.undo()
    assert json.loads(ucp("convert", zero3, tmp_path / "out", "--resume", "--json").stdout)["resumed_bytes"] > 0


@pytest.mark.parametrize(
    ("module", "step"), [(CONVERSION, "prepare"), (EXECUTION, "check_space"), (PREPARATION, "make_job")]
)
def test_an_interrupt_before_anything_is_written_has_nothing_to_resume(
    ucp: Run, zero3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, step: str
) -> None:
    monkeypatch.setattr(module, step, stop)
    assert ucp("convert", zero3, tmp_path / "out", code=130).stderr == "Error: interrupted; nothing was written\n"
    assert not any(tmp_path.iterdir())


def test_an_interrupt_beside_what_is_there_says_nothing_of_it(
    ucp: Run, zero3: Path, atoms: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CONVERSION, "prepare", stop)
    assert ucp("convert", zero3, atoms, "--overwrite", code=130).stderr == "Error: interrupted\n"


@pytest.mark.parametrize(
    "words",
    [[], ["--virtual"], ["--compress"], ["--layout", "per-parameter"], ["--to", "deepspeed"], ["--exclude", "l1.*"]],
)
def test_sizes_are_those_that_were_planned_and_those_on_disk(
    ucp: Run, zero3: Path, tmp_path: Path, words: list[str]
) -> None:
    """`plan`, `convert` and the disk count the same files and the same tensors."""
    out = tmp_path / "out"
    planned = json.loads(ucp("plan", zero3, *words, "--json").stdout)
    done = json.loads(ucp("convert", zero3, out, *words, "--json").stdout)
    on_disk = [path.stat().st_size for path in out.rglob("*") if path.is_file()]
    assert done["files_out"] == len(planned["files"])
    assert done["nbytes_written"] == planned["nbytes_written"]
    assert done["files_out"] + done["files_last"] == len(on_disk)
    assert done["nbytes_out"] + done["nbytes_last"] == sum(on_disk)
    if "--compress" not in words:
        assert done["nbytes_out"] == planned["nbytes_out"]
    page = ucp("plan", zero3, *words).stdout
    told = next(line for line in page.splitlines() if line.startswith("files "))
    made = ucp("convert", zero3, out, *words, "--overwrite").stdout
    assert [line for line in made.splitlines() if line.startswith("files ")]
    if "--compress" not in words:
        assert told.split(maxsplit=1)[1].removesuffix(", and the index") in made


def test_a_virtual_store_says_what_it_refers_to(ucp: Run, zero3: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    document = json.loads(ucp("convert", zero3, out, "--virtual", "--json").stdout)
    pieces = json.loads(ucp("inspect", out, "--param", "*", "--json").stdout)["atoms"].values()
    assert document["references"] == json.loads(ucp("plan", zero3, "--virtual", "--json").stdout)["references"]
    assert document["references"] == sum(len(s["pieces"]) for atom in pieces for s in atom["states"].values())
    page = ucp("convert", zero3, out, "--virtual", "--overwrite").stdout
    assert "278 references into the source, of 16 parameters; nothing copied" in page
    assert f"and the index: {document['files_last']} files of " in page
    assert f"checked  nothing: no tensor was read; `ucp verify {out}`" in page
    assert "0 B" not in page


@pytest.mark.parametrize("selection", ["*/step", "*/exp_avg"])
@pytest.mark.parametrize(
    "words",
    [
        ["--to", "deepspeed", "--topology", "dp=2,zero=1"],
        ["--to", "deepspeed", "--topology", "zero=0"],
        ["--to", "deepspeed-universal"],
        ["--to", "megatron"],
        ["--to", "megatron", "--layout", "torch"],
    ],
)
def test_states_without_their_weights_are_refused_with_what_is_true(
    ucp: Run, zero3: Path, tmp_path: Path, selection: str, words: list[str]
) -> None:
    """Whether the weights are left out here, or were when the store was made."""
    ucp("convert", zero3, tmp_path / "part", "--include", selection, "-q")
    for source, chosen in ((tmp_path / "part", []), (zero3, ["--include", selection])):
        said = ucp("plan", source, *chosen, *words, code=1).stderr
        assert "expected the weight of every parameter" in said
        assert f"l1.weight: {selection.removeprefix('*/')}\n" in said
        assert "the weights if --include or --exclude" in said
        assert "Traceback" not in said
