"""One rank of `test_load_ddp.py`: loads in every way the test asks about, and writes down what happened.

torchrun --nproc-per-node 3 load_worker.py FIXTURE LARGE OUT
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, distributed, nn, optim
from torch.nn.parallel import DistributedDataParallel

FIXTURES = Path(__file__).parents[3] / "fixtures"
sys.path.insert(0, str(FIXTURES / "make" / "deepspeed"))

from deepspeed_model import TinyModel, build_model, global_batch, next_token_loss  # noqa: E402

from ucp.errors import UcpError  # noqa: E402
from ucp.live.load import load_into  # noqa: E402


class Large(nn.Module):
    """One tensor that dwarfs the others."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Parameter(torch.full((10_000, 1_000), 3.0))
        self.bias = nn.Parameter(torch.zeros(301))
        self.coarse = nn.Parameter(torch.zeros(257, 3, dtype=torch.bfloat16))


def main() -> None:
    """Do it all, and leave one file per rank."""
    fixture, large, out = map(Path, sys.argv[1:])
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    result = {
        "resumed": resumed(fixture),
        "shared": shared(large),
        "failed": failed(fixture, rank),
        "subgroup": subgroup(large, rank),
    }
    (out / f"{rank}.json").write_text(json.dumps(result))
    distributed.barrier()  # a rank that leaves early takes its connections with it
    distributed.destroy_process_group()
    os._exit(0)  # gloo's threads give tensors back late: where Python is being taken down, torch 2.13 then aborts


def tiny(seed: int) -> tuple[TinyModel, optim.AdamW]:
    model = build_model(scale="tiny", seed=seed, omit=frozenset({"scalar"}))
    assert isinstance(model, TinyModel)
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim >= 2]}, {"params": [p for p in trained if p.ndim < 2]}]
    return model, optim.AdamW(groups, lr=9.0)


def resumed(fixture: Path) -> dict[str, object]:
    """A DeepSpeed checkpoint in DistributedDataParallel: what differs from the truth, and the next losses."""
    model, optimizer = tiny(seed=1)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    count = distributed.get_world_size()
    report = load_into(
        wrapped, f"dp={count}", checkpoint=fixture / "checkpoint", optimizer=optimizer, memory=2048, exchange="always"
    )
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    truth = load_file(fixture / "truth.safetensors")
    different = [key for key, wanted in truth.items() if not torch.equal(found(tensors, optimizer, key), wanted)]
    facts = json.loads((fixture / "truth.json").read_text())
    losses = []
    for step in range(facts["step"], facts["step"] + len(facts["losses_after"])):
        tokens = global_batch(step=step, shape=model.batch_shape).chunk(count)[distributed.get_rank()]
        optimizer.zero_grad()
        loss = next_token_loss(wrapped(tokens), tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.detach().clone()
        distributed.all_reduce(mean)
        losses.append(float(mean) / count)
    return {"different": different, "compared": len(truth), "losses": losses, "ranks": report.ranks}


def found(tensors: dict[str, Tensor], optimizer: optim.Optimizer, key: str) -> Tensor:
    name, _, state = key.rpartition("/")
    live = tensors[name]
    own: Tensor = live.detach() if state in ("weight", "module") else optimizer.state[live][state]
    return own


def shared(large: Path) -> dict[str, object]:
    """Bytes each rank read of a checkpoint whose bytes are nearly all in one tensor, and what arrived."""
    model = Large()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = load_into(model, checkpoint=large, memory=4 << 20, exchange="always")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "read": report.nbytes_read,
        "total": report.nbytes_total,
        "grown": grown << 10,
        "digest": digest(model),
    }


def digest(model: nn.Module) -> str:
    summed = hashlib.sha256()
    for own in model.state_dict().values():
        summed.update(own.reshape(-1).view(torch.uint8).numpy().tobytes())
    return summed.hexdigest()


def failed(fixture: Path, rank: int) -> dict[str, object]:
    """What a rank raises when only rank 1 looks in the wrong place, and whether its model is as it was."""
    model, _ = tiny(seed=2)
    before = digest(model)
    try:
        load_into(model, checkpoint=fixture / ("nowhere" if rank == 1 else "checkpoint"))
    except UcpError as error:
        return {"kind": type(error).__name__, "text": str(error), "kept": digest(model) == before}
    return {"kind": "nothing"}


def subgroup(large: Path, rank: int) -> dict[str, object]:
    """Ranks 0 and 1 load as a group of their own."""
    group = distributed.new_group([0, 1])
    if rank > 1:
        return {}
    model = Large()
    report = load_into(model, "dp=2", checkpoint=large, process_group=group)
    return {"ranks": report.ranks, "digest": digest(model)}


if __name__ == "__main__":
    main()
