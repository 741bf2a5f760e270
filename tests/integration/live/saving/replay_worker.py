"""One rank of `test_replay.py`: a mixture of experts, expert- and pipeline-parallel, that saves sparse windows.

torchrun --nproc-per-node N replay_worker.py train|recover|stages|shards PP OUT

`train` writes down what the run holds after each iteration, and is killed. `recover` replays the newest window in new
processes, and goes on. `stages` lets one stage after the other fail, and replays it alone. `shards` does all
in one process for a model that FSDP2 shards.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ucp
from ucp.errors import MissingStateError

EP, EXPERTS, WIDTH, WORDS, TOKENS, MICRO, CLIP = 2, 4, 16, 13, 6, 2, 0.1
KILLED, LAST = 9, 11
"""Iteration after which the run is killed; the last one that it would have done."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BUDGET = {"float32": 0.55, "bfloat16": 0.4}
"""Bytes of a save, as a share of a full one."""


class Exchange(torch.autograd.Function):
    """All-to-all of equal parts, forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out = torch.empty_like(tensor)
        dist.all_to_all_single(out, tensor.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return Exchange.apply(gradient, ctx.group), None


class Layer(nn.Module):
    """Dropout, a router, and this rank's experts, numbered from 0."""

    def __init__(self, group: dist.ProcessGroup, seeds: int) -> None:
        super().__init__()
        self.group = group
        torch.manual_seed(seeds)
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = nn.Module()
        self.moe.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.moe.router.register_buffer("expert_bias", torch.zeros(EXPERTS))
        experts = [nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)]
        first = dist.get_rank(group) * EXPERTS // EP
        self.moe.experts = nn.ModuleList(experts[first : first + EXPERTS // EP])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.norm(x), 0.1)
        scores = self.moe.router(hidden).softmax(-1)
        chosen = (scores.float() + self.moe.router.expert_bias).argmax(-1)
        sent = Exchange.apply(torch.cat([hidden] * EP), self.group)  # every rank sees all tokens
        chosen_of_sent = Exchange.apply(torch.cat([chosen] * EP), self.group)
        out = torch.zeros_like(sent)
        for number, expert in enumerate(self.moe.experts, dist.get_rank(self.group) * EXPERTS // EP):
            rows = (chosen_of_sent == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(sent[rows]))
        returned = Exchange.apply(out, self.group).view(EP, *hidden.shape).sum(0)
        counts = torch.bincount(chosen, minlength=EXPERTS).float()
        dist.all_reduce(counts, group=self.group)
        self.moe.router.expert_bias += 0.01 * torch.sign(counts.mean() - counts)
        return x + returned * scores.gather(1, chosen[:, None])


class Run:
    """This rank's part of the run."""

    def __init__(self, pp: int, dtype: torch.dtype, seed: int) -> None:
        self.pp, self.rank = pp, dist.get_rank()
        self.stage = self.rank // EP
        groups = [dist.new_group(list(range(stage * EP, stage * EP + EP))) for stage in range(pp)]
        self.group = groups[self.stage]
        self.model = nn.ModuleDict()
        torch.manual_seed(seed)
        if self.stage == 0:
            self.model["emb"] = nn.Embedding(WORDS, WIDTH)
        number = 2 // pp
        layers = [Layer(self.group, seed + self.stage * number + layer) for layer in range(number)]
        self.model["layers"] = nn.ModuleList(layers)
        torch.manual_seed(seed + 7)
        if self.stage == pp - 1:
            self.model["head"] = nn.Linear(WIDTH, WORDS)
        torch.manual_seed(seed + 100 + self.rank)  # dropout differs between ranks
        for param in self.model.parameters():
            param.data = param.data.to(dtype)
        self.params = dict(self.model.named_parameters())
        self.masters = None
        if dtype is not torch.float32:
            self.masters = {name: param.detach().float() for name, param in self.params.items()}
        self.optimizer = torch.optim.AdamW([*(self.masters or self.params).values()], lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.5)
        self.topology = f"dp={EP},ep={EP},pp={pp}"
        self.log = ucp.replay.StageLog()
        self.is_alone = False

    def backward(self, iteration: int) -> None:
        """Forward and backward of all micro-batches, through the pipeline; gradients are averaged over the ranks."""
        for micro in range(MICRO):
            seed = 1000 * iteration + 10 * micro + self.rank % EP
            tokens = torch.randint(WORDS, (TOKENS,), generator=torch.Generator().manual_seed(seed))
            dtype = self.params["layers.0.norm.weight"].dtype
            received = torch.empty(TOKENS, WIDTH, dtype=dtype)
            if self.stage:
                dist.recv(received, self.rank - EP)
                received.requires_grad_()
            hidden = received if self.stage else self.model["emb"](tokens)
            for layer in self.model["layers"]:
                hidden = layer(hidden)
            if self.stage == self.pp - 1:
                loss = nn.functional.cross_entropy(self.model["head"](hidden).float(), tokens.roll(1))
                (loss / MICRO).backward()
            else:
                self.send(hidden.detach(), iteration, micro)
                gradient = torch.empty_like(hidden)
                dist.recv(gradient, self.rank + EP)
                hidden.backward(gradient)
            if self.stage:
                self.send(received.grad, iteration, micro)
        for name, param in self.params.items():
            if param.grad is not None:
                param.grad /= EP
                if "experts" not in name:
                    dist.all_reduce(param.grad, group=self.group)

    def update(self, norm: torch.Tensor | None = None) -> torch.Tensor:
        """The rest of the step. Returns the norm over all ranks, or `norm`."""
        stepped = self.masters or self.params
        for name, master in (self.masters or {}).items():
            gradient = self.params[name].grad
            master.grad = None if gradient is None else gradient.float()
        if norm is None:
            squares = torch.zeros(2)
            for name, param in stepped.items():
                squares[int("experts" in name)] += param.grad.float().square().sum()
            dist.all_reduce(squares[1:], group=self.group)  # experts are of one rank each, the rest of all
            if self.pp > 1:
                both = [torch.zeros(2) for _ in range(dist.get_world_size())]
                dist.all_gather(both, squares)
                squares = sum(both[::EP])
            norm = squares.sum().sqrt()
        ucp.replay.clip(stepped.values(), CLIP, norm)
        self.optimizer.step()
        self.scheduler.step()
        for name, master in (self.masters or {}).items():
            self.params[name].data.copy_(master)
        self.model.zero_grad()
        return norm

    def replay(self, iteration: int, active: frozenset[str], scalars: Mapping[str, Any]) -> None:
        weights = {name: param.detach().clone() for name, param in self.params.items()}
        with ucp.replay.frozen(self.model, active):
            self.backward(iteration)
        self.update(scalars["clip_norm"])
        assert all(torch.equal(param, weights[name]) for name, param in self.params.items() if name not in active)

    def send(self, tensor: torch.Tensor, iteration: int, micro: int) -> None:
        """Send to the other stage, and keep for a replay; while this stage is replayed alone, the other has it."""
        self.log.keep(tensor, iteration=iteration, micro=micro, to="other")
        if not self.is_alone:
            dist.send(tensor, self.rank + (-EP if self.stage else EP))

    def feed(self, iteration: int, active: frozenset[str], scalars: Mapping[str, Any]) -> None:
        """Send the other stage, which is replayed, what it got in an iteration."""
        assert not active
        for micro in range(MICRO):
            sent = self.log.get(iteration=iteration, micro=micro, to="other")
            dist.send(sent, self.rank + (-EP if self.stage else EP))

    def save(self, folder: Path, step: int, plan: Any, norm: torch.Tensor) -> ucp.SaveHandle:
        return ucp.save(
            self.model,
            self.optimizer,
            self.topology,
            folder / f"step{step}",
            plan=plan,
            masters=self.masters,
            scheduler=self.scheduler,
            step=step,
            chain=True,
            asynchronous=True,
            extras={"clip_norm": norm},
        )

    def states(self) -> dict[str, torch.Tensor]:
        """All that this rank holds, cloned."""
        states = dict(self.model.state_dict())
        names = {id(param): name for name, param in (self.masters or self.params).items()}
        for param, values in self.optimizer.state.items():
            states |= {f"{names[id(param)]}|{state}": value for state, value in values.items()}
            states[f"{names[id(param)]}|master"] = param.detach()
        states["generator"] = torch.get_rng_state()
        states["lr"] = torch.tensor(self.scheduler.get_last_lr())
        return {name: value.clone() for name, value in states.items()}


def save_windows(run: Run, name: str, out: Path, last: int) -> dict[int, dict[str, torch.Tensor]]:
    """Train and save. What the run holds after each iteration."""
    folder, truth = out / f"chain-{name}", {}
    plan: Any = ucp.Full()
    for step in range(1, last + 1):
        run.backward(step)
        norm = run.update()
        truth[step] = run.states()
        if step <= KILLED:
            handle = run.save(folder, step, plan, norm)
        if step == 1 or step == last == KILLED:
            handle.wait()
        if step == 1:
            nbytes = ucp.inspect(folder / "step1").nbytes
            popularity = {f"layers.{layer}.moe": [3, 1, 2, 4] for layer in range(2)}
            plan = ucp.SparseWindow.fit(
                folder / "step1", bandwidth=BUDGET[name] * nbytes, seconds=1.0, first=2, popularity=popularity
            )
            assert len(plan.slots) > 2
    return truth


def train(pp: int, out: Path) -> None:
    """The run that is killed; its last save may not be whole."""
    for name, dtype in DTYPES.items():
        truth = save_windows(Run(pp, dtype, 0), name, out, LAST)
        torch.save(truth, out / f"truth-{name}-{dist.get_rank()}.pt")
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def replay_stages(pp: int, out: Path) -> Iterator[dict[str, Any]]:
    """One stage after the other fails, and is replayed with what the other one had sent it."""
    for name, dtype in DTYPES.items():
        run = Run(pp, dtype, 0)
        truth = save_windows(run, name, out, KILLED)
        norms = {n: ucp.open(out / f"chain-{name}/step{n}").extra("clip_norm") for n in range(2, KILLED + 1)}
        result: dict[str, Any] = {"differing": []}
        for failed in range(pp):
            survives, generator = run.stage != failed, torch.get_rng_state()
            new = Run(pp, dtype, 70)  # on all ranks, as it makes process groups
            new.is_alone = True
            if survives:
                torch.set_rng_state(generator)
            else:
                run = new
            options = {"masters": run.masters, "scheduler": run.scheduler, "keep": survives}
            step = run.feed if survives else run.replay
            report = ucp.densify(out / f"chain-{name}", step, run.model, run.optimizer, run.topology, **options)
            result["differing"] += list_differing(run, truth[KILLED if survives else report.iteration])
            for iteration in range(report.iteration + 1, KILLED + 1):  # what the other stage has done since
                active = frozenset() if survives else frozenset(run.params)
                step(iteration, active, {"clip_norm": norms[iteration]})
            result["differing"] += list_differing(run, truth[KILLED])
            run.is_alone = False
        for iteration in range(KILLED + 1, LAST + 1):
            run.backward(iteration)
            run.update()
        result["logged"] = run.log.nbytes
        run.log.forget(before=LAST)
        result["logged at last"] = run.log.nbytes
        whole = Run(pp, dtype, 0)
        for iteration in range(1, LAST + 1):
            whole.backward(iteration)
            whole.update()
        yield {**result, "at the end": list_differing(run, whole.states())}


class Sharded(nn.Module):
    """A model whose parameters FSDP2 shards over all ranks; experts are parts of every rank's model."""

    def __init__(self, seed: int) -> None:
        from torch.distributed.fsdp import fully_shard

        super().__init__()
        torch.manual_seed(seed)
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.moe = nn.ModuleDict({"router": nn.Linear(WIDTH, EXPERTS), "norm": nn.LayerNorm(WIDTH)})
        self.moe["experts"] = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, WORDS)
        fully_shard(self.moe["experts"][0])
        fully_shard(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.moe["norm"](self.emb(tokens))
        scores = self.moe["router"](hidden).softmax(-1)
        outputs = [expert(hidden) * scores[:, n : n + 1] for n, expert in enumerate(self.moe["experts"])]
        return nn.functional.cross_entropy(self.head(hidden + sum(outputs)), tokens.roll(1))


def replay_shards(out: Path) -> Iterator[dict[str, Any]]:
    """A run whose links are written and read as shards of DTensors."""
    slots = tuple(tuple(f"moe.experts.{n}" for n in pair) for pair in ((2, 1), (0, 3)))
    plan = ucp.SparseWindow((*slots, ("emb", "moe.router", "moe.norm", "head")), first=2)
    truth: dict[int, list[torch.Tensor]] = {}

    def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        kept = [value for param in model.parameters() for value in optimizer.state[param].values()]
        return [getattr(value, "_local_tensor", value).detach().clone() for value in (*model.parameters(), *kept)]

    def backward(model: nn.Module, iteration: int) -> None:
        generator = torch.Generator().manual_seed(10 * iteration + dist.get_rank())
        model(torch.randint(WORDS, (TOKENS,), generator=generator)).backward()

    model = Sharded(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, 5):
        backward(model, step)
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        truth[step] = states(model, optimizer)
        extras, saved = {"clip_norm": norm}, ucp.Full() if step == 1 else plan
        ucp.save(model, optimizer, None, out / f"step{step}", step=step, plan=saved, chain=True, extras=extras)
    model = Sharded(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)

    def replay(iteration: int, active: frozenset[str], scalars: Mapping[str, Any]) -> None:
        with ucp.replay.frozen(model, active):
            backward(model, iteration)
        ucp.replay.clip(model.parameters(), CLIP, scalars["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()

    report = ucp.densify(out, replay, model, optimizer)
    pairs = zip(states(model, optimizer), truth[report.iteration], strict=True)
    yield {"trained": report.active, "differing": sum(not torch.equal(one, other) for one, other in pairs)}


def list_differing(run: Run, truth: Mapping[str, torch.Tensor]) -> list[str]:
    states = run.states()
    return [name for name in {**states, **truth} if not torch.equal(states[name], truth[name])]


def recover(pp: int, out: Path) -> Iterator[dict[str, Any]]:
    """Replay the newest window of each chain, and go on."""
    for name, dtype in DTYPES.items():
        folder, run = out / f"chain-{name}", Run(pp, dtype, 50)
        truth = torch.load(out / f"truth-{name}-{run.rank}.pt")
        arguments = (run.model, run.optimizer, run.topology)
        options = {"masters": run.masters, "scheduler": run.scheduler}
        wrong = {step: {"clip_norm": torch.tensor(0.3)} for step in range(1, LAST)}
        report = ucp.densify(folder, run.replay, *arguments, scalars=wrong, **options)
        with_wrong_norm = list_differing(run, truth[report.iteration])
        report = ucp.densify(folder, run.replay, *arguments, **options)
        differing = list_differing(run, truth[report.iteration])
        for step in range(report.iteration + 1, LAST + 1):
            run.backward(step)
            run.update()
        yield {
            "iteration": report.iteration,
            "trained": report.active,
            "differing": differing,
            "with wrong norm": len(with_wrong_norm),
            "at the end": list_differing(run, truth[LAST]),
            "refused": refuse_without_norm(run, out / f"bare-{name}", folder, options),
        }


def refuse_without_norm(run: Run, bare: Path, folder: Path, options: dict[str, Any]) -> str:
    """What is said of a copy of the chain whose links lack the norm; nothing is loaded."""
    if run.rank == 0:
        shutil.copytree(folder, bare)
        for path in bare.glob("step*/ucp.json"):
            manifest = json.loads(path.read_text())
            manifest["extras"] = [extra for extra in manifest["extras"] if extra["name"] != "clip_norm"]
            del manifest["xxh3"]
            path.write_text(json.dumps(manifest))
    dist.barrier()
    before = run.states()
    try:
        ucp.densify(bare, run.replay, run.model, run.optimizer, run.topology, **options)
    except MissingStateError as error:
        assert list_differing(run, before) == []
        return str(error)
    return ""


def main() -> None:
    mode, pp, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if mode == "train":
        train(pp, out)
    modes = {"recover": recover, "stages": replay_stages, "shards": lambda pp, out: replay_shards(out)}
    results = list(modes[mode](pp, out))
    (out / f"{mode}-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
