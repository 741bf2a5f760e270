from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

import ucp
from ucp.contract.locating import Evidence, Strength
from ucp.contract.plugins import names
from ucp.contract.registry import engine, recognise, target
from ucp.errors import IdleOptionError, UnknownFormatError, UsageError


def test_built_ins_are_found_by_entry_point():
    assert {"ucp", "deepspeed"} <= set(names("ucp.formats"))
    assert target("ucp").name == "ucp"
    assert engine("serial").name == "serial"
    assert target("ucp") is target("ucp")


@pytest.mark.parametrize(("find", "known"), [(target, "targets .*ucp"), (engine, "engines .*serial")])
def test_a_name_that_is_not_there_lists_those_that_are(find, known):
    with pytest.raises(UsageError, match=f"{known}.*; got 'nope'"):
        find("nope")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("fsdp", "dcp"), ("FSDP2", "dcp"), ("torchtitan", "dcp"), ("safetensors", "huggingface"), ("hf", "huggingface")],
)
def test_a_word_for_a_target_leads_to_its_name(name, meant):
    with pytest.raises(UsageError, match=f"got {name!r}; .*{meant!r}"):
        target(name)


@pytest.mark.parametrize("kept", ["dcp", "hf", "nano", "deepspeed"])
def test_a_misspelt_family_is_named_where_none_is_needed(kept):
    with pytest.raises(UsageError, match=r"got 'lama'; .*'llama'") as caught:
        ucp.inspect(KEPT[kept], family="lama")
    assert not isinstance(caught.value, IdleOptionError)


def test_nothing_there(tmp_path):
    with pytest.raises(UnknownFormatError, match=f"{tmp_path}/nope; nothing"):
        recognise(tmp_path / "nope")


def test_a_checkpoint_above_is_named_whole(source, monkeypatch):
    (source / "junk").write_text("x")
    monkeypatch.chdir(source)
    with pytest.raises(UnknownFormatError, match=f"Did you mean {source}\\?"):
        recognise(Path("junk"))


def test_something_else_there(tmp_path):
    with pytest.raises(UnknownFormatError, match="holds nothing"):
        recognise(tmp_path)
    for n in range(7):
        (tmp_path / f"{n}.txt").write_text("x")
    with pytest.raises(UnknownFormatError, match=r"holds 0\.txt, .*4\.txt, \.\.\."):
        recognise(tmp_path)
    with pytest.raises(UnknownFormatError, match=r"0.txt is .* 1 bytes"):
        recognise(tmp_path / "0.txt")


def test_two_claims_are_not_decided_here(source, monkeypatch):
    plugins = import_module("ucp.contract.plugins")
    twin = SimpleNamespace(name="twin", detect=lambda path: Evidence(path, ("a hunch",)))
    made = plugins.instance
    monkeypatch.setattr(plugins, "registered", lambda group: {"ucp": None, "twin": None})
    monkeypatch.setattr(plugins, "instance", lambda group, name: twin if name == "twin" else made(group, name))
    with pytest.raises(UnknownFormatError, match=f"\n  {source}: twin, .*a hunch\n  {source}: ucp, "):
        recognise(source)
    twin.detect = lambda path: Evidence(path, ("a hunch",), strength=Strength.WEIGHTS)
    assert recognise(source)[0].name == "ucp"


FIXTURES = Path(__file__).parents[3] / "fixtures"
KEPT = {
    "dcp": FIXTURES / "torch" / "fsdp2-dp4" / "checkpoint",
    "hf": FIXTURES / "huggingface" / "llama" / "model",
    "nano": FIXTURES / "torch" / "ddp-dp2-nanogpt" / "checkpoint",
    "deepspeed": FIXTURES / "deepspeed" / "z3-dp4-fp32" / "checkpoint",
}


@pytest.mark.parametrize("held", [("dcp", "hf", "nano"), ("dcp", "hf"), ("dcp", "nano")])
def test_folders_of_several_formats_are_not_decided_here(held, tmp_path):
    for name in held:
        shutil.copytree(KEPT[name], tmp_path / "runs" / name)
    with pytest.raises(UnknownFormatError, match=f"holds {len(held)} checkpoints") as caught:
        recognise(tmp_path / "runs")
    assert [str(tmp_path / "runs" / name) in str(caught.value) for name in KEPT] == [name in held for name in KEPT]
    assert [recognise(tmp_path / "runs" / name)[1].root for name in held]


def test_one_checkpoint_among_what_a_run_leaves(tmp_path):
    shutil.copytree(KEPT["dcp"], tmp_path / "checkpoint-2")
    for name in ("runs/Nov22", "logs/checkpoint-2", "wandb", "empty"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "events.out.tfevents.1").touch()
    (tmp_path / "config.json").write_text("{}")
    assert recognise(tmp_path)[1].root == tmp_path / "checkpoint-2"


def test_what_lies_beside_the_tags_of_a_run_is_not_asked_about(tmp_path):
    shutil.copytree(KEPT["deepspeed"], tmp_path / "run")
    shutil.copytree(KEPT["hf"], tmp_path / "run" / "final")
    assert recognise(tmp_path / "run")[0].name == "deepspeed"
    (tmp_path / "run" / "latest").unlink()
    assert recognise(tmp_path / "run")[0].name == "deepspeed"
