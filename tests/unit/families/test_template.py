from __future__ import annotations

import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucp.families.template import Template, outline


@pytest.mark.parametrize(
    ("text", "name", "fields"),
    [
        ("a.b", "a.b", {}),
        ("layers.{layer}.w", "layers.0.w", {"layer": 0}),
        ("layers.{layer}.w", "layers.120.w", {"layer": 120}),
        ("{layer}.e.{expert}.w", "3.e.4.w", {"layer": 3, "expert": 4}),
        ("e.weight{expert}", "e.weight12", {"expert": 12}),
        ("{layer+3}.w", "3.w", {"layer": 0}),
        ("fc1.{n}", "fc1.2", {"n": 2}),
    ],
)
def test_a_name_gives_its_numbers(text, name, fields):
    template = Template(text)
    assert template.fields_in(name) == fields
    assert template.filled(fields) == name
    assert template.outline == outline(name)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a.b", "a.bc"),
        ("a.b", "axb"),
        ("layers.{layer}.w", "layers.x.w"),
        ("layers.{layer}.w", "layers.01.w"),
        ("layers.{layer}.w", "layers.-1.w"),
        ("layers.{layer}.w", "layers.٣.w"),
        ("layers.{layer}.w", "layers..w"),
        ("layers.{layer}.w", "layers.1.w\n"),
        ("layers.{layer}.w", f"layers.{'9' * 30}.w"),
        ("{layer+3}.w", "2.w"),
    ],
)
def test_other_names_are_not_its(text, name):
    assert Template(text).fields_in(name) is None


@pytest.mark.parametrize("text", ["a.{}", "a.{Layer}", "a.{layer", "a.layer}", "a.{layer+}", "{l}.{l}", "a.{layer-1}"])
def test_other_braces_are_a_mistake(text):
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        Template(text)


def test_fields_without_a_number_stay_open():
    assert Template("a.{layer}.{expert+2}").filled({"layer": 5}) == "a.5.{expert+2}"


def test_it_travels():
    assert pickle.loads(pickle.dumps(Template("a.{layer}"))) == Template("a.{layer}")


@given(st.integers(0, 10**8), st.integers(0, 999))
def test_reading_undoes_filling(layer, expert):
    template = Template("m.{layer+7}.fc2.weight{expert}")
    assert template.fields_in(template.filled({"layer": layer, "expert": expert})) == {
        "layer": layer,
        "expert": expert,
    }
