"""Go on in PyTorch FSDP2, on any number of ranks, with a run that DeepSpeed ZeRO-3 saved on 4 ranks.

torchrun --nproc-per-node 2 docs/examples/resume_in_fsdp2.py

The checkpoint is a real one, and truth.json beside it has the losses that DeepSpeed got when it went on itself.
"""

import json
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ucp

ROOT = Path(__file__).parents[2] / "fixtures"
RUN = ROOT / "deepspeed/z3-dp4-fp32"
sys.path.insert(0, str(ROOT / "make/deepspeed"))
from deepspeed_model import build_model, global_batch, next_token_loss  # noqa: E402  # the model that DeepSpeed trained

distributed.init_process_group("gloo")
rank, ranks = distributed.get_rank(), distributed.get_world_size()
model = build_model(scale="tiny", seed=1, omit=frozenset(["scalar"]))  # other weights than those of the run
shape = model.batch_shape
fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
trained = [param for param in model.parameters() if param.requires_grad]
optimizer = torch.optim.AdamW(
    [
        {"params": [param for param in trained if param.ndim >= 2]},
        {"params": [param for param in trained if param.ndim < 2]},
    ]
)


def mean_loss(loss: torch.Tensor) -> float:
    """The loss, averaged over the ranks."""
    total = loss.detach().clone()
    distributed.all_reduce(total)
    return float(total) / ranks


def train(step: int) -> float:
    """Take a step; return the loss before it."""
    tokens = global_batch(step=step, shape=shape).chunk(ranks)[rank]
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return mean_loss(loss)


report = ucp.load_into(model, None, RUN / "checkpoint", optimizer=optimizer)  # weights, moments, steps, param groups
start = report.step or 0
losses = [train(step) for step in range(start, start + 5)]
distributed.destroy_process_group()

truth = json.loads((RUN / "truth.json").read_text())
pairs = list(zip(truth["losses_after"], losses, strict=True))
if rank == 0:
    print(f"{'step':>4}  {'DeepSpeed ZeRO-3, 4 ranks':>25}  {f'FSDP2, {ranks} ranks':>14}")
    for step, loss in enumerate(truth["losses_before"]):
        print(f"{step:4}  {loss:25.6f}  {'saved here' if step == start - 1 else '':>14}")
    for step, (expected, loss) in enumerate(pairs, start):
        print(f"{step:4}  {expected:25.6f}  {loss:14.6f}")
if any(abs(expected - loss) > 1e-5 for expected, loss in pairs):
    sys.exit("expected the losses of the run that was not interrupted")
