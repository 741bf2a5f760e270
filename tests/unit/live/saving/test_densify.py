"""`ucp.densify`: a sparse window replayed is the run, bit for bit; without what the run knew it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ucp
import ucp.chain.window
import ucp.replay.densify
from ucp.errors import MissingStateError, UsageError

EXPERTS, WIDTH, BATCH, CLIP = 4, 8, 6, 0.05


class Layer(nn.Module):
    """An attention-less block with a router, experts, dropout, and a balancing bias that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = nn.Module()
        self.moe.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.moe.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.moe.router.register_buffer("expert_bias", torch.zeros(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.norm(x), 0.2)
        scores = self.moe.router(hidden).softmax(-1)
        chosen = (scores.float() + self.moe.router.expert_bias).topk(2, -1).indices
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.moe.experts):
            rows = (chosen == number).any(-1).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(hidden[rows]) * scores[rows, number : number + 1])
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).float()
        self.moe.router.expert_bias += 0.01 * torch.sign(counts.mean() - counts)
        return x + out


class Run:
    """A run that clips, with a scheduler; with masters if its model is bfloat16."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        torch.manual_seed(seed)
        self.model = nn.ModuleDict({"emb": nn.Embedding(11, WIDTH), "head": nn.Linear(WIDTH, 11)})
        self.model["layers"] = nn.ModuleList(Layer() for _ in range(2))
        for param in self.model.parameters():
            param.data = param.data.to(dtype)
        self.masters = None
        params = dict(self.model.named_parameters())
        if dtype is not torch.float32:
            self.masters = params = {name: param.detach().float() for name, param in params.items()}
        decayed = [param for param in params.values() if param.ndim > 1]
        groups = [{"params": decayed}, {"params": [p for p in params.values() if p.ndim < 2], "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.7)

    def backward(self, iteration: int) -> None:
        tokens = torch.randint(11, (BATCH,), generator=torch.Generator().manual_seed(iteration))
        hidden = self.model["emb"](tokens)
        for layer in self.model["layers"]:
            hidden = layer(hidden)
        nn.functional.cross_entropy(self.model["head"](hidden).float(), tokens.roll(1)).backward()

    def update(self, norm: torch.Tensor | None = None) -> torch.Tensor:
        """The rest of the step; the norm that clipped the gradients, which is `norm` if it is given."""
        params = dict(self.model.named_parameters())
        for name, master in (self.masters or {}).items():
            gradient = params[name].grad
            master.grad = None if gradient is None else gradient.float()
        stepped = [param for group in self.optimizer.param_groups for param in group["params"]]
        if norm is None:
            norm = nn.utils.clip_grad_norm_(stepped, CLIP)
        else:
            ucp.replay.clip(stepped, CLIP, norm)
        self.optimizer.step()
        self.scheduler.step()
        for name, master in (self.masters or {}).items():
            if params[name].grad is not None:
                params[name].data.copy_(master)
        self.model.zero_grad()
        return norm

    def replay(self, iteration: int, active: frozenset[str], scalars: Mapping[str, Any]) -> None:
        with ucp.replay.frozen(self.model, active):
            self.backward(iteration)
        self.update(scalars["clip_norm"])

    def states(self) -> dict[str, torch.Tensor]:
        """All that the run holds, cloned."""
        states = dict(self.model.state_dict())
        names = {id(param): name for name, param in (self.masters or dict(self.model.named_parameters())).items()}
        for param, values in self.optimizer.state.items():
            states |= {f"{names[id(param)]}|{state}": value for state, value in values.items()}
            states[f"{names[id(param)]}|master"] = param.detach()
        states["generator"] = torch.get_rng_state()
        states["lr"] = torch.tensor([group["lr"] for group in self.optimizer.param_groups])
        return {name: value.clone() for name, value in states.items()}


EXPERT_NAMES = [f"layers.{layer}.moe.experts.{expert}" for layer in range(2) for expert in range(EXPERTS)]
PLAN = ucp.SparseWindow(
    (
        tuple(EXPERT_NAMES[1:6]),
        (*EXPERT_NAMES[6:], "layers.0", "layers.1.moe.router"),
        (EXPERT_NAMES[0], "emb", "layers.1", "layers.0.moe.router", "head"),
    ),
    first=2,
)


def train(
    folder: Path, dtype: torch.dtype, last: int = 10, keep: int | None = None
) -> dict[int, dict[str, torch.Tensor]]:
    """Links of every iteration; iteration to what the run held after it."""
    run = Run(0, dtype)
    truth = {}
    for step in range(1, last + 1):
        run.backward(step)
        norm = run.update()
        plan, extras = (ucp.Full(), {}) if step == 1 else (PLAN, {"clip_norm": norm})
        arguments = {"masters": run.masters, "scheduler": run.scheduler, "step": step, "extras": extras}
        arguments |= {"plan": plan, "chain": True, "keep": keep}
        ucp.save(run.model, run.optimizer, None, folder / f"step{step}", **arguments)
        truth[step] = run.states()
    return truth


def densify(folder: Path, dtype: torch.dtype, **arguments: Any) -> tuple[Run, ucp.DensifyReport]:
    run = Run(1, dtype)
    options = {"masters": run.masters, "scheduler": run.scheduler, **arguments}
    step = options.pop("step", run.replay)
    return run, ucp.densify(folder, step, run.model, run.optimizer, **options)


def list_differing(run: Run, truth: Mapping[str, torch.Tensor]) -> list[str]:
    states = run.states()
    assert states.keys() == truth.keys()
    return [name for name, value in truth.items() if not torch.equal(states[name], value)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_replayed_is_the_run(tmp_path: Path, dtype: torch.dtype) -> None:
    truth = train(tmp_path, dtype)
    run, report = densify(tmp_path, dtype)
    assert (report.first, report.iteration) == (8, 10)  # 2-4, 5-7, 8-10
    assert list_differing(run, truth[10]) == []
    assert str(report.iteration) in str(report)
    assert report.as_dict()["active"] == list(report.active)
    run, report = densify(tmp_path, dtype, at=9)  # the newest whole window ends before
    assert report.iteration == 7
    assert list_differing(run, truth[7]) == []
    for step in range(8, 11):  # and the run goes on as it did
        run.backward(step)
        run.update()
    assert list_differing(run, truth[10]) == []


def test_a_chain_that_keeps_one_window_is_replayed(tmp_path: Path) -> None:
    truth = train(tmp_path, torch.bfloat16, last=9, keep=1)
    assert sorted(path.name for path in tmp_path.glob("step*")) == [f"step{step}" for step in range(5, 10)]
    run, _ = densify(tmp_path, torch.bfloat16)
    assert list_differing(run, truth[7]) == []


def test_steps_may_train_what_is_frozen(tmp_path: Path) -> None:
    """As where DistributedDataParallel waits for all gradients."""
    truth = train(tmp_path, torch.bfloat16, last=4)
    run = Run(1, torch.bfloat16)

    def step(iteration: int, active: frozenset[str], scalars: Mapping[str, Any]) -> None:
        run.backward(iteration)
        run.update(scalars["clip_norm"])

    ucp.densify(tmp_path, step, run.model, run.optimizer, masters=run.masters, scheduler=run.scheduler)
    assert list_differing(run, truth[4]) == []


def test_a_full_link_needs_no_replay(tmp_path: Path) -> None:
    truth = train(tmp_path, torch.float32, last=3)
    run, report = densify(tmp_path, torch.float32, step=None)
    assert (report.iteration, report.active) == (1, ())
    assert list_differing(run, truth[1]) == []


def test_without_the_norm_it_is_refused_and_with_another_it_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = train(tmp_path, torch.float32, last=4)
    run, _ = densify(tmp_path, torch.float32, scalars={3: {"clip_norm": 0.5}})
    assert len(list_differing(run, truth[4])) > 20
    run = Run(1, torch.float32)
    before = run.states()
    monkeypatch.setattr("ucp.replay.densify.load_extra", lambda extra, read: None)
    monkeypatch.setattr("ucp.chain.window.CLIP_NORM", "other_norm")  # which no link has
    with pytest.raises(MissingStateError, match=r"(?s)3: other_norm.*4: other_norm"):
        ucp.densify(tmp_path, run.replay, run.model, run.optimizer)
    assert list_differing(run, before) == []


def test_incomplete_windows_and_other_checkpoints(tmp_path: Path) -> None:
    train(tmp_path / "chain", torch.float32)
    run = Run(1, torch.float32)
    for steps in ((2, 4, 5, 6), (2, 6, 10)):  # of the second, each link has another slot
        ucp.add_to_chain(tmp_path / str(steps), [tmp_path / f"chain/step{step}" for step in steps])
        with pytest.raises(MissingStateError, match="iteration 2"):
            ucp.densify(tmp_path / str(steps), run.replay, run.model, run.optimizer)
    with pytest.raises(UsageError, match="ucp"):
        ucp.densify(tmp_path / "chain/step1", run.replay, run.model, run.optimizer)


def test_frozen_modules_keep_the_graph() -> None:
    run = Run(0, torch.float32)
    every = {name for name, _ in run.model.named_parameters()}
    for active in (set(), {"layers.0.moe.experts.1.weight"}, {"head.bias"}, every):
        run.model.zero_grad()
        with ucp.replay.frozen(run.model, active):
            run.backward(3)  # even if nothing that the loss depends on is trained
        with_gradient = {name for name, param in run.model.named_parameters() if param.grad is not None}
        assert with_gradient <= active
    assert with_gradient == every
    assert all(param.requires_grad for param in run.model.parameters())
    with pytest.raises(UsageError, match="tail"), ucp.replay.frozen(run.model, {"tail"}):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clip_is_that_of_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(5, 3, generator=generator).to(dtype) for _ in range(4)]
    for most in (0.1, 3.0, 1e3):
        ours, theirs = ([nn.Parameter(torch.zeros_like(g)) for g in gradients] for _ in range(2))
        for params in (ours, theirs):
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient.clone()
        norm = nn.utils.clip_grad_norm_(theirs, most)
        ucp.replay.clip([*ours, nn.Parameter(torch.zeros(1))], most, norm)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))
    ucp.replay.clip(ours, 0.1, None)
    assert torch.equal(ours[0].grad, theirs[0].grad)


def test_ranks_that_keep_what_they_hold_only_take_part(tmp_path: Path) -> None:
    train(tmp_path, torch.bfloat16, last=4)
    run, steps = Run(3, torch.bfloat16), []
    run.backward(1)
    run.update()
    before = run.states()
    options = {"masters": run.masters, "scheduler": run.scheduler, "keep": True}
    ucp.densify(tmp_path, lambda *step: steps.append(step[:2]), run.model, run.optimizer, **options)
    assert steps == [(3, frozenset()), (4, frozenset())]
    assert list_differing(run, before) == []


def test_a_log_keeps_copies_until_they_are_dropped() -> None:
    log, sent = ucp.replay.StageLog(), torch.ones(3)
    for iteration in (4, 5):
        assert log.keep(sent, iteration=iteration, micro=0, to="next") is sent
    sent.zero_()
    assert torch.equal(log.get(iteration=4, micro=0, to="next"), torch.ones(3))
    assert log.nbytes == 24
    log.forget(before=5)
    assert log.nbytes == 12
    for wrong in ({"iteration": 4}, {"micro": 1}, {"to": "previous"}):
        with pytest.raises(MissingStateError, match="5 to 5"):
            log.get(**{"iteration": 5, "micro": 0, "to": "next", **wrong})


def step_scaled(run: Run, scaler: Any, iteration: int, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A step with a loss scaler, which skips the third because of a gradient of the embedding."""
    tokens = torch.randint(11, (BATCH,), generator=torch.Generator().manual_seed(iteration))
    hidden = run.model["layers"][0](run.model["emb"](tokens))
    scaler.scale(nn.functional.cross_entropy(run.model["head"](hidden), tokens.roll(1))).backward()
    scaler.unscale_(run.optimizer)
    if known is None:
        norm = nn.utils.get_total_norm([param.grad for param in run.model.parameters() if param.grad is not None])
        known = {"clip_norm": norm, "skipped": iteration == 3}
    if not known["skipped"]:
        ucp.replay.clip(run.model.parameters(), CLIP, known["clip_norm"])
        run.optimizer.step()
    scaler.update(scaler.get_scale() / 2 if known["skipped"] else None)
    run.model.zero_grad()
    return {name: known[name] for name in ("clip_norm", "skipped")}


def test_a_skipped_step_is_replayed_as_one(tmp_path: Path) -> None:
    run, scaler, seen = Run(0, torch.float32), torch.amp.GradScaler("cpu", init_scale=64.0), []
    for iteration in range(1, 5):
        extras = step_scaled(run, scaler, iteration)
        plan = ucp.Full() if iteration == 1 else PLAN
        options = {"plan": plan, "step": iteration, "chain": True, "scaler": scaler, "extras": extras}
        ucp.save(run.model, run.optimizer, None, tmp_path / f"{iteration}", **options)
    truth = run.states()
    run, scaler = Run(1, torch.float32), torch.amp.GradScaler("cpu", init_scale=1.0)

    def replay(iteration: int, active: frozenset[str], scalars: Mapping[str, Any]) -> None:
        seen.append((iteration, scaler.get_scale(), scalars["skipped"]))
        with ucp.replay.frozen(run.model, active):
            step_scaled(run, scaler, iteration, scalars)

    ucp.densify(tmp_path, replay, run.model, run.optimizer, scaler=scaler)
    assert seen == [(3, 64.0, True), (4, 32.0, False)]
    assert scaler.get_scale() == 32
    assert list_differing(run, truth) == []
