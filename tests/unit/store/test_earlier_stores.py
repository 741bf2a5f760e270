"""Stores that earlier versions wrote are read: every folder of `fixtures/stores` is a version, and what it wrote."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ucp
from ucp.errors import UnsupportedError
from ucp.io.json_text import with_digest
from ucp.store.manifest import parse

FIXTURES = Path(__file__).parents[3] / "fixtures"
STORES = sorted(FIXTURES.glob("stores/*/*/ucp.json"))


@pytest.mark.parametrize("manifest", STORES, ids=lambda path: "-".join(path.parts[-3:-1]))
def test_a_store_of_an_earlier_version_is_read(manifest: Path) -> None:
    store = manifest.parent
    saved = store.with_suffix(".pt")
    source = saved if saved.exists() else FIXTURES / "deepspeed/z1-dp2-fp16/checkpoint"
    assert f'"producer":"ucp {store.parent.name}"' in manifest.read_text()
    assert ucp.diff(store, source, extras=not saved.exists()).equal
    assert ucp.verify(store).ok


def test_there_is_a_store_of_every_kind() -> None:
    kinds = {manifest.parent.name for manifest in STORES}
    assert kinds == {"packed", "per-parameter", "compressed", "saved"}


def test_a_manifest_in_a_form_of_another_version_is_not_called_damaged() -> None:
    text = with_digest(b'{"ucp":1,"producer":"ucp 0.1.0","atoms":{}}')
    with pytest.raises(UnsupportedError, match=re.escape("ucp 0.1.0")):
        parse(text, "store/ucp.json")
