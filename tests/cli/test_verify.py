"""`ucp verify`: 0 when all is well, 3 when it is not."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run


def flip(path: Path, offset: int) -> None:
    """Change one bit."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_what_is_whole_passes(ucp: Run, atoms: Path, zero3: Path) -> None:
    assert "whole and undamaged" in ucp("verify", atoms).stdout
    assert f"equal to  {zero3}" in ucp("verify", atoms, "--against", zero3).stdout
    assert "whole and undamaged" in ucp("verify", zero3).stdout


def test_a_flipped_byte_is_exit_code_3_and_names_the_state(ucp: Run, atoms: Path) -> None:
    (pack,) = (atoms / "packs").iterdir()
    flip(pack, pack.stat().st_size - 1)
    result = ucp("verify", atoms, code=3)
    assert "Damage" in result.stdout
    assert pack.name in result.stdout
    assert result.stderr == ""


def test_a_truncated_pack_is_damage(ucp: Run, atoms: Path) -> None:
    (pack,) = (atoms / "packs").iterdir()
    pack.write_bytes(pack.read_bytes()[:-8])
    assert "Damage" in ucp("verify", atoms, code=3).stdout


def test_a_missing_shard_is_damage(ucp: Run, copy: Path) -> None:
    (copy / "global_step3" / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    document = json.loads(ucp("verify", copy, "--json", code=3).stdout)
    assert document["ok"] is False
    assert "zero_pp_rank_2" in document["problems"][0]


def test_another_checkpoint_is_a_difference(ucp: Run, atoms: Path, mixed: Path) -> None:
    assert "Values, by parameter" in ucp("verify", atoms, "--against", mixed, code=3).stdout


def test_what_is_no_checkpoint_is_a_failure(ucp: Run, tmp_path: Path) -> None:
    assert "expected a checkpoint" in ucp("verify", tmp_path, code=1).stderr


def test_json_has_the_keys_of_its_schema(ucp: Run, atoms: Path) -> None:
    document = json.loads(ucp("verify", atoms, "--json").stdout)
    assert document["schema"] == "ucp.verify/1"
    assert set(document) == {"schema", "ok", "path", "against", "checked_bytes", "problems", "changes", "casts"}


def test_quiet_only_sets_the_exit_code(ucp: Run, atoms: Path) -> None:
    assert ucp("verify", atoms, "-q").stdout == ""
    (pack,) = (atoms / "packs").iterdir()
    flip(pack, pack.stat().st_size - 1)
    assert ucp("verify", atoms, "-q", code=3).stdout == ""
