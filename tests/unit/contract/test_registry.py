from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest

from ucp.contract.protocols import Evidence
from ucp.contract.registry import engine, names, recognise, target
from ucp.errors import UnknownFormatError, UsageError


def test_built_ins_are_found_by_entry_point():
    assert {"ucp", "deepspeed"} <= set(names("ucp.formats"))
    assert target("ucp").name == "ucp"
    assert engine("serial").name == "serial"
    assert target("ucp") is target("ucp")


@pytest.mark.parametrize("find", [target, engine])
def test_a_name_that_is_not_there_lists_those_that_are(find):
    with pytest.raises(UsageError, match=r"expected one of the (targets .*ucp|engines .*serial).*; got 'nope'"):
        find("nope")


def test_the_format_of_a_path_is_recognised(source):
    fmt, evidence = recognise(source)
    assert fmt.name == "ucp"
    assert evidence.root == source


def test_nothing_there(tmp_path):
    with pytest.raises(UnknownFormatError, match="nothing is there"):
        recognise(tmp_path / "nope")


def test_something_else_there(tmp_path):
    with pytest.raises(UnknownFormatError, match="it holds nothing"):
        recognise(tmp_path)
    for n in range(7):
        (tmp_path / f"{n}.txt").write_text("x")
    with pytest.raises(UnknownFormatError, match=r"it holds 0\.txt, .*4\.txt, \.\.\."):
        recognise(tmp_path)
    with pytest.raises(UnknownFormatError, match="a file of 1 bytes"):
        recognise(tmp_path / "0.txt")


def test_two_claims_are_not_decided_here(source, monkeypatch):
    registry = import_module("ucp.contract.registry")
    twin = SimpleNamespace(name="twin", gives_way=False, detect=lambda path: Evidence(path, ("a hunch",)))
    made = registry._made
    monkeypatch.setattr(registry, "_found", lambda group: {"ucp": None, "twin": None})
    monkeypatch.setattr(registry, "_made", lambda group, name: twin if name == "twin" else made(group, name))
    with pytest.raises(UnknownFormatError, match=r"could be several formats \(twin because of a hunch; ucp because"):
        recognise(source)
    twin.gives_way = True
    assert recognise(source)[0].name == "ucp"
