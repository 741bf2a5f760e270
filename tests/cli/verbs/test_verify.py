"""`ucp verify`: 0 when all is well, 1 when it is damaged, 3 when it is whole and differs from another."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path

from tests.cli.conftest import FIXTURES, Run


def flip(path: Path, offset: int) -> None:
    """Change one bit."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def rewrite(path: Path, offset: int) -> None:
    """Change one bit of a torch archive as a program does that saves it: with the checksum of the new bytes."""
    with zipfile.ZipFile(path) as archive:
        saved = {info: archive.read(info) for info in archive.infolist()}
    held = max((info for info in saved if info.header_offset < offset), key=lambda info: info.header_offset)
    changed = bytearray(saved[held])
    changed[offset - path.read_bytes().index(saved[held], held.header_offset)] ^= 1
    saved[held] = bytes(changed)
    with zipfile.ZipFile(path, "w") as archive:
        for info, data in saved.items():
            archive.writestr(info.filename, data)


def test_what_is_whole_passes(ucp: Run, atoms: Path, zero3: Path) -> None:
    assert "complete and undamaged" in ucp("verify", atoms).stdout
    assert f"equal to  {zero3}" in ucp("verify", atoms, "--against", zero3).stdout
    assert "complete and undamaged" in ucp("verify", zero3).stdout


def test_a_flipped_byte_is_exit_code_1_and_names_the_state(ucp: Run, atoms: Path) -> None:
    (pack,) = (atoms / "packs").iterdir()
    flip(pack, pack.stat().st_size - 1)
    result = ucp("verify", atoms, code=1)
    assert result.stdout.splitlines()[0] == f"{atoms}: damaged"
    assert "Damage" in result.stdout
    assert pack.name in result.stdout
    assert result.stderr == ""


def test_another_checkpoint_is_a_difference(ucp: Run, atoms: Path, mixed: Path) -> None:
    page = ucp("verify", atoms, "--against", mixed, code=3).stdout
    assert re.fullmatch(rf"{atoms}: differs from {mixed}, \d+ differences", page.splitlines()[0])
    assert "in itself  complete and undamaged" in page
    assert "Values, by parameter" in page
    assert "damaged" not in page.replace("undamaged", "")


def test_what_is_damaged_is_not_compared(ucp: Run, atoms: Path, mixed: Path) -> None:
    (pack,) = (atoms / "packs").iterdir()
    flip(pack, pack.stat().st_size - 1)
    page = ucp("verify", atoms, "--against", mixed, code=1).stdout
    assert page.splitlines()[0] == f"{atoms}: damaged"
    assert f"not compared with  {mixed}" in page
    assert "differs from" not in page


def test_copies_that_drifted_are_not_called_damage(ucp: Run, tmp_path: Path) -> None:
    """Two tensor-parallel ranks hold one norm; the second's is changed, with its checksum put right."""
    source = FIXTURES.parent / "megatron" / "gpt-tp2-pp2-torch" / "checkpoint"
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    document = json.loads(ucp("inspect", copy, "--param", "decoder.layers.0.input_layernorm.weight", "--json").stdout)
    states = document["atoms"]["decoder.layers.0.input_layernorm.weight"]["states"]
    piece = next(own for own in states["weight"]["pieces"] if own["replica"])
    rewrite(Path(piece["path"]), piece["offset"])
    page = ucp("verify", copy, code=1).stdout
    assert page.splitlines()[0] == f"{copy}: holds copies that should be equal and are not"
    assert "Copies that differ" in page
    assert "Damage" not in page
    found = json.loads(ucp("verify", copy, "--json", code=1).stdout)
    assert found["problems"] == found["drift"] != []


def test_what_is_no_checkpoint_is_a_failure(ucp: Run, tmp_path: Path) -> None:
    assert f"{tmp_path} is none" in ucp("verify", tmp_path, code=1).stderr


def test_json_has_the_keys_of_its_schema(ucp: Run, atoms: Path) -> None:
    document = json.loads(ucp("verify", atoms, "--json").stdout)
    assert document["schema"] == "ucp.verify/1"
    assert set(document) == {
        "schema",
        "ok",
        "path",
        "against",
        "checked_bytes",
        "problems",
        "drift",
        "experts",
        "unnamed",
        "changes",
        "casts",
        "notes",
    }


def test_quiet_only_sets_the_exit_code(ucp: Run, atoms: Path) -> None:
    assert ucp("verify", atoms, "-q").stdout == ""
    (pack,) = (atoms / "packs").iterdir()
    flip(pack, pack.stat().st_size - 1)
    assert ucp("verify", atoms, "-q", code=1).stdout == ""


def test_copied_ranks_are_damage_and_inspect_shows_the_doubt(ucp: Run, copy: Path) -> None:
    first, second = sorted(copy.glob("*/zero_pp_rank_[01]_*optim_states.pt"))
    shutil.copyfile(first, second)
    said = ucp("verify", copy, code=1).stdout
    assert f"{copy}: damaged" in said
    assert f"{first.name} and {second.name} hold the same bytes" in said
    page = ucp("inspect", copy).stdout
    assert "NO: see In doubt" in page
    assert "hold the same bytes" in page
    (doubt,) = json.loads(ucp("inspect", copy, "--json").stdout)["doubts"]
    assert doubt["kind"] == "equal-ranks"
    assert "--accept equal-ranks" in ucp("plan", copy, code=1).output
    assert "Warnings" in ucp("plan", copy, "--accept", "equal-ranks").stdout
    lost = FIXTURES / "z1-dp4-fp32" / "universal"
    gap = Path(shutil.copytree(lost, copy.parent / "gap"))
    (gap / "global_step3_universal" / "zero" / "l2.weight" / "exp_avg_sq.pt").unlink()
    assert "l2.weight: exp_avg_sq" in ucp("verify", gap, code=1).stdout
    assert "NO: see Missing" in ucp("inspect", gap).stdout
    assert "l2.weight: exp_avg_sq" in json.loads(ucp("inspect", gap, "--json").stdout)["missing"][0]


def test_an_export_is_compared_under_its_names(ucp: Run, tmp_path: Path) -> None:
    """Megatron joins queries, keys and values, and pads the vocabulary."""
    source, export = FIXTURES.parent / "megatron/llama-tp2-pp2-dp2-full/checkpoint", tmp_path / "export"
    ucp("convert", source, export, "--to", "huggingface")
    assert f"equal to  {source}" in ucp("verify", export, "--against", source).stdout
    file = export / "model.safetensors"
    flip(file, file.stat().st_size - 1)
    assert "1 difference" in ucp("verify", export, "--against", source, code=3).stdout.splitlines()[0]
