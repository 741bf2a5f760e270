from __future__ import annotations

import pickle

from ucp.contract.registry import family
from ucp.families.naming import CANONICAL, StoredName, Tables
from ucp.families.rule import Rule
from ucp.families.template import Template


def counted(made: list[int]):
    """One entry; each time it is asked for is noted."""
    made.append(1)
    rule = Rule(name=Template("own.{layer}.w"), axes={})
    yield StoredName(rule.name, rule, None, 0, CANONICAL)


def test_names_that_count_on_sizes_are_those_of_the_model():
    """However many models were read before."""
    own = family("gpt-neox")
    for layers in (2, 3, 2, 4, 5, 6, 7, 8, 2):
        bound = own.bind(arguments={"num_layers": layers})
        assert bound.canonical(f"{layers + 3}.norm.weight", "pipeline") == "decoder.final_layernorm.weight"
        assert bound.canonical(f"{layers + 4}.norm.weight", "pipeline") is None
    assert own.canonical("5.norm.weight", "pipeline") is None


def test_it_is_made_once_for_the_same_sizes():
    tables, made = Tables(), []
    for _ in range(3):
        table = tables.get({"layers": 2}, counted(made))
        assert {key: [own.template.text for own in entries] for key, entries in table.items()} == {
            (style, "own.#.w"): ["own.{layer}.w"] for style in (None, CANONICAL)
        }
    assert len(made) == 1


def test_those_of_the_last_models_are_kept():
    tables, made = Tables(), []
    for layers in (1, 2, 3, 4, 1, 5, 1, 2):
        tables.get({"layers": layers}, counted(made))
    assert len(made) == 6, "1 was asked for in between, 2 was let go for 5"


def test_they_stay_behind_when_a_family_travels():
    tables, made = Tables(), []
    tables.get({}, counted(made))
    pickle.loads(pickle.dumps(tables)).get({}, counted(made))
    assert len(made) == 2
