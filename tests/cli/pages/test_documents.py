"""The page about JSON documents names every key of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from tests.cli.conftest import Run

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "json.md"

EXPERTS = PAGE.parents[2] / "fixtures/deepspeed/z1-ep2/checkpoint"

FREE = {"hyper", "aliases", "value", "patterns", "run", "layers"}
"""Keys whose value has keys of the checkpoint's own, or of the options'."""

REFERS = {"as above": "ucp.inspect/1", "as for `plan`": "ucp.plan/1", "as for `diff`": "ucp.diff/1"}
"""How a section says that keys are described in another one."""


def keys(document: object, *, named: bool = False) -> Iterator[str]:
    """Keys of the schema in a document. `named`: the keys of this object are names in the checkpoint."""
    if isinstance(document, list):
        for item in document:
            yield from keys(item)
    elif isinstance(document, dict):
        for key, value in document.items():
            if not named:
                yield key
            if key not in FREE or isinstance(value, list):
                yield from keys(value, named=not named and key in {"atoms", "states"} and isinstance(value, dict))


def described(schema: str) -> set[str]:
    """Words of the section about a document, and of those that it refers to."""
    sections = dict(re.findall(r"^## (ucp\S+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE))
    text = sections[schema] + "".join(sections[of] for word, of in REFERS.items() if word in sections[schema])
    return {"schema", *re.findall(r"\w+", text)}


def assert_described(text: str) -> None:
    document = json.loads(text)
    assert set(keys(document)) - described(document["schema"]) == set()


def test_every_key_of_a_conversion_is_described(ucp: Run, zero3: Path, mixed: Path, copy: Path, tmp_path: Path) -> None:
    (copy / "global_step3" / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    assert_described(ucp("inspect", mixed, "--json", "--param", "*").stdout)
    assert_described(ucp("plan", mixed, "--json").stdout)
    assert_described(ucp("convert", mixed, tmp_path / "out", "--json").stdout)
    assert_described(ucp("verify", tmp_path / "out", "--json").stdout)
    assert_described(ucp("diff", zero3, mixed, "--json", code=3).stdout)
    assert_described(ucp("inspect", copy, "--json", code=1).stdout)
    assert_described(ucp("delta", tmp_path / "out", mixed, "--out", tmp_path / "weight_v000001", "--json").stdout)


def test_every_key_about_experts_is_described(ucp: Run, tmp_path: Path) -> None:
    (tmp_path / "loads.json").write_text("[[9, 1, 1, 1], [1, 1, 1, 1]]")
    cluster = ("--nodes", 2, "--slots", 4, "--loads", tmp_path / "loads.json")
    ucp("place", *cluster, "--out", tmp_path / "placement.json", "--form", "sglang")
    assert_described(ucp("place", *cluster, "--from", tmp_path / "placement.json", "--json").stdout)
    assert_described(ucp("place", "--tasks", "512:256", "--gpus", 4, "--json").stdout)
    model = ("--params-dense", "2G", "--params-expert", "14G", "--experts", 64, "--bandwidth", "20GB")
    memory = ("--gpu-memory", "80GB", "--host-memory", "200GB", "--disk", "1TB", "--moe-layers", 12)
    assert_described(ucp("advise", "--iter-time", 3, "--mtbf", 2, *model, *memory, "--json").stdout)
    assert_described(ucp("inspect", EXPERTS, "--experts", "--json").stdout)
