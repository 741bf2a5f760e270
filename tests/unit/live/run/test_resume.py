"""What a run goes on with beside its model: schedulers, the scale of the loss, what ranks kept for themselves."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn, optim

import ucp
from tests.unit.live.cluster import module_of
from tests.unit.live.threads import run
from ucp.errors import LoadError, NoSuchNameError, UsageError

FIXTURES = Path(__file__).parents[4] / "fixtures"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))
        self.b = nn.Parameter(torch.zeros(2))


def adam(*, groups: int = 1) -> optim.AdamW:
    net = Net()
    return optim.AdamW([{"params": [own]} for own in net.parameters()][:groups], lr=1.0)


MAKERS = {
    "step": lambda own: optim.lr_scheduler.StepLR(own, 2, gamma=0.5),
    "lambda": lambda own: optim.lr_scheduler.LambdaLR(own, lambda step: 1 / (1 + step)),
    "cosine": lambda own: optim.lr_scheduler.CosineAnnealingLR(own, 10),
    "steps": lambda own: optim.lr_scheduler.MultiStepLR(own, [2, 4]),
    "sequence": lambda own: optim.lr_scheduler.SequentialLR(
        own,
        [optim.lr_scheduler.LinearLR(own, 0.1, total_iters=2), optim.lr_scheduler.ExponentialLR(own, 0.9)],
        milestones=[2],
    ),
}


def stepped(kind: str, steps: int) -> optim.lr_scheduler.LRScheduler:
    optimizer = adam()
    scheduler = MAKERS[kind](optimizer)
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
    return scheduler


def pickled(folder: Path, **extras: object) -> Path:
    """A checkpoint as a script saves it with torch.save, in which everything beside the model is pickled."""
    path = folder / "saved.pt"
    torch.save({"model": {"w": torch.ones(3), "b": torch.ones(2)}, **extras}, path)
    return path


@pytest.mark.filterwarnings("ignore::UserWarning")  # SequentialLR uses what torch itself deprecates
@pytest.mark.parametrize("kind", MAKERS)
def test_a_scheduler_goes_on(tmp_path, kind):
    other = stepped(kind, 3)
    path = pickled(tmp_path, scheduler=other.state_dict())
    fresh = stepped(kind, 0)
    report = ucp.load_into(Net(), path, scheduler=fresh)
    assert report.restored == (f"scheduler {type(fresh).__name__}, from scheduler",)
    assert fresh.state_dict() == other.state_dict()
    assert "scheduler" not in report.extras


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("kind", "other"), [("step", "lambda"), ("cosine", "step"), ("sequence", "lambda")])
def test_a_scheduler_of_another_class_is_told(tmp_path, kind, other):
    path = pickled(tmp_path, scheduler=stepped(kind, 3).state_dict())
    fresh = stepped(other, 0)
    before = fresh.state_dict()
    net = Net()
    with pytest.raises(LoadError, match=rf"scheduler {type(fresh).__name__}: scheduler .*\(it kept"):
        ucp.load_into(net, path, scheduler=fresh)
    assert not net.w.any()
    report = ucp.load_into(net, path, scheduler=fresh, strict=False)
    assert report.problems[0].startswith(f"scheduler {type(fresh).__name__}: scheduler ")
    assert report.restored == ()
    assert fresh.state_dict() == before


def test_a_scheduler_of_other_groups_is_told(tmp_path):
    path = pickled(tmp_path, scheduler=stepped("step", 3).state_dict())
    fresh = MAKERS["step"](adam(groups=2))
    with pytest.raises(LoadError, match=r"base_lrs has 1 entry, .* 2"):
        ucp.load_into(Net(), path, scheduler=fresh)


def test_no_scheduler_at_all_is_told(tmp_path):
    with pytest.raises(LoadError, match=r"scheduler StepLR: .* no state"):
        ucp.load_into(Net(), pickled(tmp_path), scheduler=stepped("step", 0))
    with pytest.raises(UsageError, match="state_dict and load_state_dict; got int"):
        ucp.load_into(Net(), pickled(tmp_path), scheduler=3)


def test_of_two_states_that_fit_none_is_taken(tmp_path):
    states = {"scheduler": stepped("step", 3).state_dict(), "lr_scheduler": stepped("step", 2).state_dict()}
    with pytest.raises(LoadError, match=r"scheduler StepLR: .*: scheduler, lr_scheduler\."):
        ucp.load_into(Net(), pickled(tmp_path, **states), scheduler=stepped("step", 0))


def test_a_scheduler_of_deepspeed(tmp_path):
    class Warmup:
        """With the state of all of DeepSpeed's."""

        def __init__(self) -> None:
            self.at = -1

        def state_dict(self):
            return {"last_batch_iteration": self.at}

        def load_state_dict(self, state):
            self.at = state["last_batch_iteration"]

    path = FIXTURES / "deepspeed" / "z2-dp2-client-state" / "checkpoint"
    own = Warmup()
    report = ucp.load_into(whole(path), path, scheduler=own)
    assert own.at == 2
    assert report.restored == ("scheduler Warmup, from lr_scheduler",)


def whole(path: Path) -> nn.Module:
    return module_of(ucp.open(path))


@pytest.mark.parametrize("fixture", ["z1-dp2-fp16", "z0-fp16"])
def test_the_scale_of_deepspeed_goes_on_in_torch(fixture):
    path = FIXTURES / "deepspeed" / fixture / "checkpoint"
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    report = ucp.load_into(whole(path), path, scaler=scaler)
    wanted = {"scale": 512.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2}
    # by iteration 3 the scale has grown once, from 256: with ZeRO after step 2 of 3, without it after step 3
    assert scaler.state_dict() == {**wanted, "_growth_tracker": 1 if fixture.startswith("z1") else 0}
    assert report.restored == ("scaler GradScaler, from loss_scaler",)


def test_the_scale_of_torch_goes_on(tmp_path):
    state = {"scale": 8.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7, "_growth_tracker": 5}
    scaler = torch.amp.GradScaler("cpu")
    ucp.load_into(Net(), pickled(tmp_path, scaler=state), scaler=scaler)
    assert scaler.state_dict() == state


def test_a_scale_that_is_not_there_is_told(tmp_path):
    with pytest.raises(LoadError, match=r"scaler: .*loss scale"):
        ucp.load_into(Net(), pickled(tmp_path), scaler=torch.amp.GradScaler("cpu"))
    report = ucp.load_into(Net(), pickled(tmp_path), scaler=torch.amp.GradScaler("cpu", enabled=False))
    assert "the scaler is not enabled: nothing is restored into it" in report.notes


VERL = FIXTURES / "torch" / "verl-fsdp2-dp4" / "checkpoint"
"""Four ranks, each with random states of its own."""


@pytest.mark.parametrize(
    ("policy", "wanted"), [("carry", [0, 1, 2, 3]), ("replicate", [0, 0, 0]), ("replicate", [0] * 5), ("drop", [None])]
)
def test_what_ranks_kept_goes_where_the_policy_says(policy, wanted):
    files = [VERL / f"extra_state_world_size_4_rank_{rank}.pt" for rank in range(4)]
    kept = [torch.load(file, weights_only=False)["rng"] for file in files]
    reports = run(len(wanted), lambda ranks: ucp.load_into(whole(VERL), VERL, process_group=ranks, rank_extras=policy))
    for own, source in zip(reports, wanted, strict=True):
        if source is not None:
            rng = own.carried["rng"]
            assert rng["random"] == kept[source]["random"]
            assert np.array_equal(rng["numpy"][1], kept[source]["numpy"][1])
            assert torch.equal(rng["cpu"], kept[source]["cpu"])
        dropped = "rng: of single ranks; rank_extras='carry' or 'replicate' loads it"
        assert (dropped in own.dropped, bool(own.carried)) == (source is None, source is not None)
        assert "rng" not in own.extras
        assert "\nUnused extras\n" in str(own)
        assert "lr_scheduler" in own.extras


def test_other_ranks_than_were_saved_cannot_carry():
    found = run(3, lambda ranks: ucp.load_into(whole(VERL), VERL, process_group=ranks, rank_extras="carry"))
    (told,) = {str(own) for own in found}
    assert {type(own) for own in found} == {LoadError}
    assert " 4, " in told
    assert "(rng); got 3" in told


def test_random_states_of_the_trainer_are_set(tmp_path):
    """As `transformers` saves them for two ranks, beside a checkpoint in a folder."""
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(FIXTURES / "deepspeed" / "z2-dp2-hf-trainer" / "checkpoint-3", folder)
    drawn = {}
    for rank in range(2):
        random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
        states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
        torch.save(states, folder / f"rng_state_{rank}.pth")
        drawn[rank] = (random.random(), np.random.random(), torch.rand(1).item())
    torch.save({"last_epoch": 3}, folder / "scheduler.pt")
    model = whole(folder)
    for policy in ("carry", "replicate"):
        reports = run(
            2, lambda ranks, p=policy: ucp.load_into(whole(folder), folder, process_group=ranks, rank_extras=p)
        )
        restored = "RNG states (python, numpy, torch), from companion/rng_state.pth"
        assert all(restored in own.restored for own in reports)
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    with pytest.raises(LoadError, match=r" 2, .*rng_state.*\); got 1"):
        ucp.load_into(model, folder, rank_extras="carry")
    ucp.load_into(model, folder, rank_extras="replicate")
    assert (random.random(), np.random.random(), torch.rand(1).item()) == drawn[0]
    checkpoint = ucp.open(folder)
    assert checkpoint.extra("companion/scheduler.pt") == {"last_epoch": 3}
    assert checkpoint.extra("companion/trainer_state.json")["global_step"] == 3
    held = checkpoint.extra("companion/rng_state_1.pth", rank=1)
    np.random.set_state(held["numpy"])
    torch.set_rng_state(held["cpu"])
    assert (np.random.random(), torch.rand(1).item()) == drawn[1][1:]


def test_random_states_of_megatron_go_by_their_place():
    path = FIXTURES / "megatron" / "gpt-tp2-pp2-dp2-full" / "checkpoint"
    saved_states = {place: ucp.open(path).extra(f"rng_state/{place}")[0] for place in ("pp0.tp0", "pp0.tp1", "pp1.tp1")}
    wanted = {0: "pp0.tp0", 1: "pp0.tp1", 3: "pp0.tp1", 7: "pp1.tp1"}
    reports = run(8, lambda ranks: ucp.load_into(whole(path), path, process_group=ranks, rank_extras="carry"))
    for rank, place in wanted.items():
        own = reports[rank].carried["rng_state"]
        assert torch.equal(own["torch_rng_state"], saved_states[place]["torch_rng_state"])
        trackers = own["rng_tracker_states"]
        assert torch.equal(
            trackers["model-parallel-rng"], saved_states[place]["rng_tracker_states"]["model-parallel-rng"]
        )


def test_places_of_torchtitans_reader_are_carried():
    path = FIXTURES / "torch" / "fsdp2-dp4-titan" / "checkpoint"
    reports = run(4, lambda ranks: ucp.load_into(whole(path), path, process_group=ranks, rank_extras="carry"))
    assert [own.carried for own in reports] == [{"dataloader": b"place of the reader"}] * 4


def test_an_extra_that_is_not_there():
    checkpoint = ucp.open(VERL)
    assert "random" in checkpoint.extra("rng", rank=1)
    with pytest.raises(NoSuchNameError, match=r"'rng' of rank 4; .*None, 1, 2, 3"):
        checkpoint.extra("rng", rank=4)
    with pytest.raises(NoSuchNameError, match="no extra 'sampler'; there are "):
        checkpoint.extra("sampler")


def test_the_report_tells_what_happened(tmp_path):
    report = ucp.load_into(Net(), pickled(tmp_path, epoch=3))
    told = json.loads(json.dumps(report.as_dict()))
    assert set(told["stages"]) == {"index", "plan", "read", "restore"}
    assert told["seconds"] == pytest.approx(report.seconds)
    assert told["nbytes_loaded"] == 20
    assert "B/s" in str(report)
    assert "Unused extras\n  - epoch" in str(report)
