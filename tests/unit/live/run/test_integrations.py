"""What `ucp.integrations` does without the libraries that it is for; tests/integration runs it with them."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from contextlib import nullcontext
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn, optim

import ucp
from ucp.errors import MissingLibraryError, UnsupportedError, UsageError
from ucp.integrations.accelerate import load_state
from ucp.integrations.ray_train import resume
from ucp.integrations.run import LoadIntoArguments, find_base, load_run
from ucp.integrations.transformers import accept_any_checkpoint

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "resume-in-a-client.md"
STEPS = 4
LIBRARIES = {"transformers": "", "accelerate": "", "lightning": "ResumeFrom", "torchtitan": "ResumingManager"}
"""Module of `ucp.integrations`: its class that derives from one of the library."""


class Run:
    """A model that has been stepped some times, with a schedule that halves the rate each time."""

    def __init__(self, steps: int = 0) -> None:
        self.model = nn.Linear(3, 2)
        self.optimizer = optim.AdamW(self.model.parameters(), lr=1.0)
        self.scheduler = optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.5**step)
        for _ in range(steps):
            self.model(torch.ones(1, 3)).sum().backward()
            self.optimizer.step()
            self.scheduler.step()

    @property
    def rate(self) -> float:
        return self.optimizer.param_groups[0]["lr"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    run = Run(STEPS)
    (tmp_path / "saved").mkdir()
    states = {"model": run.model, "optimizer": run.optimizer}
    torch.save({name: value.state_dict() for name, value in states.items()}, tmp_path / "saved" / "saved.pt")
    return tmp_path / "saved" / "saved.pt"


def test_modules_are_imported_without_their_libraries_which_one_message_asks_for():
    lines = [
        f"sys.modules[{name!r}] = None" for name in ("accelerate", "lightning", "ray", "torchtitan", "transformers")
    ]
    lines += ["from ucp.errors import MissingLibraryError", "assert 'torch' not in sys.modules"]
    for module, name in LIBRARIES.items():
        lines.append(f"import ucp.integrations.{module} as module")
        if name:
            lines += ["try:", f"    module.{name}()", "except MissingLibraryError as error:", "    print(error)"]
    lines += ["from ucp.integrations.ray_train import resume", "try:", "    resume(None, None)"]
    lines += ["except MissingLibraryError as error:", "    print(error)"]
    script = "\n".join(("import sys", *lines))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    printed = done.stdout.splitlines()
    assert [line.rpartition(" ")[2] for line in printed] == ["lightning", "torchtitan", "ray"]


def test_the_page_imports_what_is_there():
    imports = re.findall(r"from (ucp\.integrations\.\w+) import (\w+)", PAGE.read_text())
    assert {module.rpartition(".")[2] for module, _ in imports} == {*LIBRARIES, "ray_train"}
    assert all(hasattr(import_module(module), name) for module, name in imports)


def test_further_arguments_are_all_of_load_into_but_the_objects_of_the_run():
    objects = {"model", "checkpoint", "optimizer", "masters", "scheduler", "scaler", "snapshots", "process_group"}
    assert signature(ucp.load_into).parameters.keys() - objects == LoadIntoArguments.__annotations__.keys()


def test_a_class_of_a_library_that_is_there_is_that_class():
    assert find_base("collections", "OrderedDict") is __import__("collections").OrderedDict


def test_a_library_whose_own_dependencies_are_missing_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "json.tool", None)
    with pytest.raises(MissingLibraryError, match=r"json\.tool"):
        find_base("json.tool", "Tool")()


def test_a_schedule_of_another_class_is_advanced_to_the_step(saved):
    run = Run()
    report = load_run(saved, [run.model], [run.optimizer], [run.scheduler], schedule="advance")
    assert report.step == STEPS
    assert run.rate == 0.5**STEPS
    assert run.scheduler.last_epoch == STEPS


def test_by_default_the_state_of_the_scheduler_is_loaded(saved, tmp_path):
    run, stepped = Run(), Run(STEPS)
    states = {"model": stepped.model, "optimizer": stepped.optimizer, "scheduler": stepped.scheduler}
    torch.save({name: value.state_dict() for name, value in states.items()}, tmp_path / "whole.pt")
    report = load_run(tmp_path / "whole.pt", [run.model], [run.optimizer], [run.scheduler])
    assert run.scheduler.state_dict() == stepped.scheduler.state_dict()
    assert len(report.restored) == 1
    assert torch.equal(run.model.weight, stepped.model.weight)


@pytest.mark.parametrize("counts", [(0, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_runs_of_several_models_are_refused(counts, saved):
    run = Run()
    objects = ([run.model], [run.optimizer], [run.scheduler])
    with pytest.raises(UsageError, match=f"got {max(counts, key=lambda count: abs(count - 1))}"):
        load_run(saved, *(own * count for own, count in zip(objects, counts, strict=True)))


def test_an_unknown_way_to_set_the_schedule_is_refused(saved):
    run = Run()
    with pytest.raises(UsageError, match="restore, advance; got 'skip'"):
        load_run(saved, [run.model], [run.optimizer], [run.scheduler], schedule="skip")


def test_objects_that_a_script_registered_get_their_state_or_a_warning(saved, caplog, monkeypatch):
    class Counter:
        def load_state_dict(self, state: dict[str, int]) -> None:
            self.state = state

    run, counters = Run(), [Counter(), Counter()]
    accelerator = SimpleNamespace(_models=[run.model], _optimizers=[run.optimizer], _schedulers=[], scaler=None)
    accelerator._custom_objects = counters
    torch.save({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}, saved.with_name("pytorch_model.bin"))
    (saved.parent / "accelerate").mkdir()
    states = torch.load(saved)
    torch.save(states["model"], saved.parent / "accelerate" / "pytorch_model.bin")
    torch.save(states["optimizer"], saved.parent / "accelerate" / "optimizer.bin")
    torch.save({"steps": 3}, saved.parent / "accelerate" / "custom_checkpoint_0.pkl")
    monkeypatch.setenv("UCP_CHECKPOINT", str(saved.parent / "accelerate"))
    with caplog.at_level(logging.WARNING, "ucp"):
        load_state(accelerator)
    assert counters[0].state == {"steps": 3}
    assert not hasattr(counters[1], "state")
    assert [record.args for record in caplog.records] == [("Counter", "companion/custom_checkpoint_1.pkl")]


def test_anything_but_an_accelerator_is_refused(saved):
    with pytest.raises(UsageError):
        load_state(None, saved)


def test_a_trainer_that_loads_in_another_way_is_refused():
    with pytest.raises(UnsupportedError, match="_prepare_for_training"):
        accept_any_checkpoint(SimpleNamespace(train=print, _inner_training_loop=print, _init_training_state=print))


@pytest.mark.parametrize("has_reported", [True, False])
def test_a_worker_of_ray_prefers_what_its_run_reported(has_reported, saved, tmp_path, monkeypatch):
    later = Run(STEPS + 1)
    (tmp_path / "reported").mkdir()
    states = {"model": later.model.state_dict(), "optimizer": later.optimizer.state_dict()}
    torch.save(states, tmp_path / "reported" / "saved.pt")
    reported = SimpleNamespace(as_directory=lambda: nullcontext(str(tmp_path / "reported")))
    train = ModuleType("ray.train")
    train.get_checkpoint = lambda: reported if has_reported else None
    monkeypatch.setitem(sys.modules, "ray.train", train)
    run = Run()
    report = resume(run.model, run.optimizer, saved, scheduler=run.scheduler, schedule="advance")
    assert report is not None
    assert report.step == STEPS + has_reported
    assert run.rate == 0.5 ** (STEPS + has_reported)
    assert (resume(run.model, run.optimizer) is None) is not has_reported
