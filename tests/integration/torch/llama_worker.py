"""Llama of transformers under FSDP, tensor parallelism and DDP, from what ucp made of a Megatron checkpoint.

    torchrun --nproc-per-node 4 llama_worker.py JOBS.json
    PYTHONPATH=.mcore/0.16.1 python llama_worker.py JOBS.json --reference

JOBS.json: `{"checkpoint", "groups", "truth", "step", "out", "save"}`. Of each way of training,
torch.distributed.checkpoint loads `checkpoint` into a model and an AdamW of another seed, by `get_state_dict` and
`set_state_dict`; what they then hold, whole, goes to `out/<way>.safetensors`, logits and losses of the next three steps
to `out/<way>.json`. What FSDP2 has loaded it saves again, to `save`; FSDP2 with tensor parallelism saves what it has
after them, to `out/trained`. `--reference`: the same three steps with megatron-core's GPTModel in one process, its
weights and states set from `truth`, the tensors that Megatron's ranks held (`out/reference.json`).
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "fixtures" / "make" / "huggingface"))
sys.path.insert(0, str(Path(__file__).parents[3] / "fixtures" / "make" / "megatron"))
sys.path.insert(0, str(Path(__file__).parents[1] / "families"))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from make_hf_names import MODELS, built
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ucp.live.load import load_into

LLAMA = replace(MODELS["llama-3"], settings=MODELS["llama-3"].settings | {"rms_norm_eps": 1e-5})
"""As Megatron's fixtures have it."""
WAYS = {"fsdp2": 1, "fsdp2-tp": 2, "ddp": 1}
"""Way of training to its degree of tensor parallelism."""
STEPS = 3

Groups = list[Mapping[str, object]]


def main() -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    if "--reference" in sys.argv:
        reference(job)
        return
    dist.init_process_group("gloo")
    for way, tp in WAYS.items():
        trained(way, tp, job)
    dist.barrier()
    dist.destroy_process_group()


def trained(way: str, tp: int, job: Mapping[str, object]) -> None:
    """Load and go on in one way of training."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(len(way))
    model = wrapped(built(LLAMA).float(), way, mesh)
    optimizer = adam(model.named_parameters(), job["groups"])
    out = Path(job["out"])
    if job["live"]:
        load_into(model, checkpoint=job["live"], optimizer=optimizer)
    else:
        model_state, states = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": states}
        dcp.load(state, checkpoint_id=job["checkpoint"])
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if way == "fsdp2" and not job["live"]:
        model_state, states = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": states, "step": job["step"]}, checkpoint_id=job["save"])
    found = {way: whole(model, optimizer)}
    rank, ranks = mesh.get_local_rank("dp"), mesh["dp"].size()
    report = goes_on(lambda rows: model(input_ids=rows).logits, optimizer, (rank, ranks))
    if way == "fsdp2-tp" and not job["live"]:
        model_state, states = get_state_dict(model, optimizer)
        step = job["step"] + STEPS
        dcp.save({"model": model_state, "optimizer": states, "step": step}, checkpoint_id=out / "trained")
        found["trained"] = whole(model, optimizer)
    if dist.get_rank() == 0:
        for name, held in found.items():
            save_file(held, out / f"{name}.safetensors")
        (out / f"{way}.json").write_text(json.dumps(report))


def wrapped(model: nn.Module, way: str, mesh: object) -> nn.Module:
    """The model in its parallelism, over all of the mesh."""
    if way == "ddp":
        return DistributedDataParallel(model)
    layers = model.model.layers
    if mesh["tp"].size() > 1:
        cuts = {f"self_attn.{own}_proj": ColwiseParallel() for own in "qkv"}
        cuts |= {f"mlp.{own}_proj": ColwiseParallel() for own in ("gate", "up")}
        cuts |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        for layer in layers:
            parallelize_module(layer, mesh["tp"], cuts)
    for layer in layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def adam(params: Iterable[tuple[str, nn.Parameter]], groups: Groups) -> torch.optim.AdamW:
    """AdamW with Megatron's two groups: norms are not decayed."""
    named = list(params)
    norms = [own for name, own in named if "norm" in name]
    others = [own for name, own in named if "norm" not in name]
    hyper = sorted(groups, key=lambda own: -own["weight_decay"])
    return torch.optim.AdamW(
        [{**own, "params": params} for own, params in zip(hyper, (others, norms), strict=True)], lr=0.0
    )


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Full tensors as `<name>/<state>`, gathered from all ranks."""
    model_state, states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    found = {f"{name}/weight": own for name, own in model_state.items()}
    found |= {
        f"{name}/{state}": own for name, all_of in states.get("state", {}).items() for state, own in all_of.items()
    }
    return {name: own.detach().clone().contiguous() for name, own in found.items()}


def goes_on(
    logits: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, place: tuple[int, int]
) -> dict[str, object]:
    """Logits at once and losses of the next steps. `place`: number of this rank, and of how many."""
    rank, ranks = place
    with torch.no_grad():
        report: dict[str, object] = {"logits": logits(tokens(99)).flatten().tolist(), "losses": []}
    for at in range(STEPS):
        rows = tokens(at).chunk(ranks)[rank]
        found = logits(rows)
        loss = nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        report["losses"].append(float(mean))
    return report


def tokens(seed: int) -> Tensor:
    return torch.randint(0, 50, (4, 12), generator=torch.Generator().manual_seed(seed))


def reference(job: Mapping[str, object]) -> None:
    """The same with megatron-core alone."""
    from forward_worker import gpt_model, start
    from megatron_shims import install, kernels, patch_mcore

    install()
    with kernels():
        from megatron_model import load_mcore

        load_mcore()
    patch_mcore(fused_adam=False)
    start()
    truth = load_file(job["truth"])
    weights = {name.removesuffix("/weight"): own for name, own in truth.items() if name.endswith("/weight")}
    model = gpt_model("llama", json.loads(built(LLAMA).config.to_json_string(use_diff=False)), weights)
    optimizer = adam(model.named_parameters(), job["groups"])
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(weights[name])
            moments = {state: truth[f"{name}/{state}"].clone() for state in ("exp_avg", "exp_avg_sq")}
            optimizer.state[param] = {"step": torch.tensor(float(job["step"])), **moments}

    def logits(rows: Tensor) -> Tensor:
        length = rows.shape[1]
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
        return model(rows, torch.arange(length).expand_as(rows), mask)

    Path(job["out"], "reference.json").write_text(json.dumps(goes_on(logits, optimizer, (0, 1))))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
