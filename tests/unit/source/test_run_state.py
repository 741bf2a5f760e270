"""Step and scheduler of runs that keep them under keys of their own: written where the other framework looks."""

from pathlib import Path
from textwrap import dedent

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import lr_scheduler

import ucp
from ucp.errors import LoadError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, for saves and loads of one process

STEPS = 3


def sequence(optimizer: optim.Optimizer) -> lr_scheduler.SequentialLR:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


KINDS = {
    "step": lambda own: lr_scheduler.StepLR(own, 2),
    "sequence": sequence,
    "chain": lambda own: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(own, 2), lr_scheduler.ConstantLR(own)]),
    "plateau": lr_scheduler.ReduceLROnPlateau,
}


class Run:
    """A model that was trained for a few steps."""

    def __init__(self, kind: str = "step", steps: int = STEPS) -> None:
        self.model = torch.nn.Linear(4, 3)
        self.optimizer = optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = KINDS[kind](self.optimizer)
        for _ in range(steps):
            self.model(torch.ones(1, 4)).sum().backward()
            self.optimizer.step()
            self.scheduler.step(*([1.0] if kind == "plateau" else []))

    @property
    def schedule(self) -> dict[str, object]:
        return self.scheduler.state_dict()

    def save_dcp(self, path: Path, **others: object) -> Path:
        """As the tutorial of torch does: everything in one object `app`."""
        model, states = get_state_dict(self.model, self.optimizer)
        dcp.save({"app": {"model": model, "optimizer": states, **others}}, checkpoint_id=path, no_dist=True)
        return path

    def save_file(self, path: Path, **others: object) -> Path:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), **others}
        torch.save(state, path)
        return path


def zero_state(path: Path) -> dict[str, object]:
    (file,) = path.glob("*/mp_rank_00_model_states.pt")
    return torch.load(file, weights_only=False)


def lines(report: object) -> str:
    return "\n".join((*report.notes, *report.dropped))


@pytest.mark.parametrize("kind", KINDS)
def test_a_scheduler_below_app_goes_to_deepspeed_with_the_step_of_the_optimizer(tmp_path, kind):
    run = Run(kind)
    source = run.save_dcp(tmp_path / "source", scheduler=run.schedule)
    report = ucp.convert(source, tmp_path / "zero", to="deepspeed", topology="dp=2,zero=2")
    assert (tmp_path / "zero" / "latest").read_text() == "global_step3"
    state = zero_state(tmp_path / "zero")
    assert state["lr_scheduler"] == run.schedule
    assert state["global_steps"] == STEPS
    assert not report.dropped
    assert "state is taken from app.scheduler, as lr_scheduler" in lines(report)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", ["sched", "scheduler", "lr_scheduler"])
def test_a_scheduler_of_a_file_is_loaded_from_dcp_as_lr_scheduler(tmp_path, kind, key):
    run = Run(kind)
    source = run.save_file(tmp_path / "all.pt", **{key: run.schedule})
    report = ucp.convert(source, tmp_path / "dcp", to="dcp")
    assert not report.dropped
    fresh = Run(kind, steps=0)
    state = {"lr_scheduler": fresh.scheduler, "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert fresh.schedule == run.schedule
    assert state["step"] == STEPS


def test_a_scheduler_that_the_style_has_no_place_for_is_only_said_to_be_left_behind(tmp_path):
    """accelerate loads schedulers from files of its own."""
    run = Run()
    source = run.save_file(tmp_path / "all.pt", sched=run.schedule)
    report = ucp.plan(source, to="dcp", settings={"style": "accelerate"})
    assert not any("sched" in note for note in report.notes)
    (dropped,) = report.dropped
    assert dropped.endswith(" keys for: sched")
    with pytest.raises(UsageError, match="drop --set scheduler=sched"):
        ucp.plan(source, to="dcp", settings={"style": "accelerate", "scheduler": "sched"})


def test_a_step_that_is_written_is_not_said_to_be_left_out(tmp_path):
    source = Run().save_file(tmp_path / "all.pt", step=7, note="mine")
    report = ucp.convert(source, tmp_path / "dcp", to="dcp")
    (dropped,) = report.dropped
    assert dropped.endswith("--set style=nested has no keys for: note")
    assert ucp.inspect(tmp_path / "dcp").step == 7


def test_a_step_beside_the_model_counts_wherever_that_lies(tmp_path):
    run = Run()
    model, optimizer = run.model.state_dict(), run.optimizer.state_dict()
    torch.save({"app": {"model": model, "optimizer": optimizer, "step": 7}}, tmp_path / "all.pt")
    assert ucp.inspect(tmp_path / "all.pt").step == 7
    assert ucp.inspect(run.save_dcp(tmp_path / "dcp", step=8)).step == 8


def test_of_several_schedulers_none_is_chosen_silently(tmp_path):
    run, other = Run(), Run(steps=2)
    source = run.save_file(tmp_path / "all.pt", critic=other.schedule, schedulers={"actor": run.schedule})
    zero = {"to": "deepspeed", "topology": "dp=1,zero=1"}
    report = ucp.convert(source, tmp_path / "none", **zero)
    assert "schedulers critic, schedulers.actor: none is written as lr_scheduler" in lines(report)
    assert zero_state(tmp_path / "none")["lr_scheduler"] is None
    report = ucp.convert(source, tmp_path / "one", settings={"scheduler": "schedulers.actor"}, **zero)
    assert zero_state(tmp_path / "one")["lr_scheduler"] == run.schedule
    assert report.dropped == ("DeepSpeed's files have no place for these extras: critic",)
    with pytest.raises(UsageError, match=r"got actor\. It has critic, schedulers.actor"):
        ucp.plan(source, settings={"scheduler": "actor"}, **zero)


def test_a_load_goes_by_the_same_states_and_the_same_choice(tmp_path):
    run, other = Run(), Run(steps=2)
    source = run.save_dcp(tmp_path / "source", scheduler=run.schedule, critic={"schedule": other.schedule})
    fresh = Run(steps=0)
    with pytest.raises(LoadError, match=r": app\.scheduler, app\.critic\.schedule\. "):
        ucp.load_into(fresh.model, source, scheduler=fresh.scheduler)
    report = ucp.load_into(
        fresh.model, source, scheduler=fresh.scheduler, settings={"scheduler": "app.critic.schedule"}
    )
    assert report.restored == ("scheduler StepLR, from app.critic.schedule",)
    assert fresh.schedule == other.schedule


def test_what_the_user_says_of_the_step_overrides_what_the_optimizer_counts(tmp_path):
    source = Run().save_file(tmp_path / "all.pt")
    ucp.convert(source, tmp_path / "zero", to="deepspeed", topology="dp=1,zero=1", settings={"step": "12"})
    assert (tmp_path / "zero" / "latest").read_text() == "global_step12"
    with pytest.raises(UsageError, match=r"--set step .*got late"):
        ucp.plan(source, to="dcp", settings={"step": "late"})
    said = Run().save_file(tmp_path / "said.pt", step=3)
    with pytest.raises(UsageError, match="3: drop --set step=4"):
        ucp.plan(said, to="dcp", settings={"step": "4"})


def test_counts_that_differ_are_no_step(tmp_path):
    run = Run()
    run.optimizer.state[run.model.bias]["step"] += 1
    report = ucp.plan(run.save_file(tmp_path / "all.pt"), to="deepspeed", topology="dp=1,zero=0")
    assert "range from 3 to 4" in "\n".join(report.dropped)


def test_scripts_of_dcp_find_their_scheduler_where_it_was_too(tmp_path):
    """A conversion to another topology keeps the keys of the script, and adds the usual one."""
    run = Run()
    model, states = get_state_dict(run.model, run.optimizer)
    state = {"model": model, "optimizer": states, "sched": run.schedule, "best": [{"loss": 0.5}, {"loss": 0.25}]}
    dcp.save(state, checkpoint_id=tmp_path / "source", no_dist=True)
    ucp.convert(tmp_path / "source", tmp_path / "two", to="dcp", topology="dp=2")
    for key in ("sched", "lr_scheduler"):
        fresh = Run(steps=0)
        others = {"best": [{"loss": 0.0}, {"loss": 0.0}]}
        dcp.load({key: fresh.scheduler, **others}, checkpoint_id=tmp_path / "two", no_dist=True)
        assert fresh.schedule == run.schedule
        assert others["best"] == state["best"]


def test_the_snippet_for_plain_torch_resumes_the_schedule(tmp_path, monkeypatch):
    """The code of docs/how-to/resume-fsdp.md, as it stands there."""
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "resume-fsdp.md").read_text()
    section = page.split("## Plain torch")[1].split("## ")[0]
    code = [line for line in section.splitlines() if line.startswith("    ") and "ucp convert" not in line]
    run, fresh = Run(), Run(steps=0)
    source = run.save_dcp(tmp_path / "ckpt", scheduler=run.schedule)
    ucp.convert(source, tmp_path / "moved", to="dcp", topology="dp=4")
    monkeypatch.chdir(tmp_path)
    names = {"model": fresh.model, "optimizer": fresh.optimizer, "scheduler": fresh.scheduler}
    exec(
        dedent("\n".join(code)),
        {"dcp": dcp, "get_state_dict": get_state_dict, "set_state_dict": set_state_dict, **names},
    )
    assert fresh.schedule == run.schedule
    assert fresh.optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"]
    assert torch.equal(fresh.model.weight, run.model.weight)


def test_a_checkpoint_before_the_first_step(tmp_path):
    """get_state_dict gives a fresh optimizer step 1 and moments of zero, and torch resumes from it."""
    source = Run(steps=0).save_dcp(tmp_path / "source")
    report = ucp.convert(source, tmp_path / "zero", to="deepspeed", topology="dp=1,zero=1")
    assert "has not stepped yet" in lines(report)
    assert (tmp_path / "zero" / "latest").read_text() == "global_step0"
    fresh = Run()
    ucp.load_into(fresh.model, source, optimizer=fresh.optimizer)
    assert not any(state["exp_avg"].any() for state in fresh.optimizer.state.values())
