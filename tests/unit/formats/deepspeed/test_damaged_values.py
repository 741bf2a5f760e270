"""Whatever stands in a file in place of what should, the answer is an index that tiles or an error of ucp."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ucp_formats.deepspeed.read.source import DeepSpeedFormat

from ucp.core.gaps import check_cover
from ucp.errors import SourceError

JUNK = (
    None, -1, 0, 1, 10**12, "x", [], {}, [None], {0: {}}, 1.5, True, (), (3, 4), float("nan"), b"x", {"a.weight": 1},
    torch.zeros(3), torch.zeros(()), torch.zeros(2, 3), torch.zeros(0), torch.arange(8).reshape(2, 4).t(),
)  # fmt: skip


def places(value: object) -> Iterator[tuple[object, object]]:
    """Every container in `value` with each of its keys."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def damage(root: object, chance: random.Random) -> None:
    container, key = chance.choice(list(places(root)))
    match chance.choice(["remove", "replace", "replace", "rename"]):
        case "remove":
            del container[key]
        case "rename" if isinstance(container, dict):
            container[chance.choice(["zz", 5, None])] = container.pop(key)
        case _:
            container[key] = copy.copy(chance.choice(JUNK))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_any_value_in_place_of_any_other(tmp_path: Path, fake_run, stage: int) -> None:
    outcomes = {"read": 0, "refused": 0}
    for seed in range(60):
        chance = random.Random(f"{stage}/{seed}")
        run = fake_run(stage, chance.choice([1, 2, 3]))
        for _ in range(chance.choice([1, 1, 2])):
            damage(chance.choice(list(run.files.values())), chance)
        path = run.save(tmp_path / str(seed))
        try:
            check_cover(DeepSpeedFormat().read(path))
            outcomes["read"] += 1
        except SourceError:
            outcomes["refused"] += 1
    assert all(outcomes.values()), outcomes
