"""One rank of `test_load_sharded.py`: loads checkpoints into models that torch shards, and goes on training.

torchrun --nproc-per-node 4 sharded_worker.py JOBS OUT     (JOBS: a JSON list of {source, case, ...}; OUT: a folder)

What every rank holds after a load is gathered by torch itself (`full_tensor`) and compared with the fixture's truth.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "fixtures" / "make" / "torch"))

import torch
import torch.distributed as dist
import torch_train
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch_cases import CASES, Case

from ucp.live.load import load_into

FIXTURES = Path(__file__).parents[3] / "fixtures"


def fill_ramp(model: torch_train.TinyModel) -> None:
    """Compute what no checkpoint has, as models on the meta device must."""
    model.ramp.copy_(torch.linspace(0.0, 1.0, len(model.ramp)))


def main() -> None:
    torch_train.TinyModel.reset_parameters = fill_ramp
    jobs, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = [done(job) for job in jobs]
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def done(job: dict[str, Any]) -> dict[str, Any]:
    """Load one checkpoint into one layout; what differs from the truth, and the next losses."""
    folder = FIXTURES / job["source"]
    is_foreign = job["source"].startswith("deepspeed")
    fields = {name: getattr(CASES[job["case"]], name) for name in Case.__dataclass_fields__} if "case" in job else {}
    case = Case(**{"name": "own", **fields, **job.get("fields", {})})
    plain = torch_train._model
    if is_foreign:  # whose fixtures have a parameter without elements too
        torch_train._model = lambda _: torch_train.TinyModel(omit=frozenset({"scalar"}))
    wrapped = torch_train._wrapped
    if job.get("wrapped"):
        torch_train._wrapped = lambda case, model, mesh: wrapped(case, compiled_and_checkpointed(model), mesh)
    if "fsdp1" in job:
        torch_train._wrapped = lambda case, model, mesh: fsdp1(model, **job["fsdp1"])
    with torch.device("meta" if job.get("meta") else "cpu"):
        run = torch_train.Run(case, seed=1, foreign=is_foreign)
    torch_train._wrapped = wrapped
    torch_train._model = plain
    if "zero" in job:
        groups = [
            {key: own for key, own in group.items() if key != "initial_lr"} for group in run.optimizer.param_groups
        ]
        run.optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW, **job["zero"])
        run.scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, step_size=2, gamma=0.5)
    for name in job.get("forms", {}):
        run.optimizer.defaults[name] = run.optimizer.param_groups[0][name] = True
        run.optimizer.param_groups[-1][name] = True
    if job.get("masters"):
        return with_masters(run, job, folder)
    if job.get("stepped"):
        run.step(99)  # states are there, and are reused; a root that FSDP2 has left whole is sharded again
    stepping = getattr(run.optimizer, "optim", run.optimizer)
    held = {id(state["exp_avg"]) for state in stepping.state.values() if state}
    options = {"exchange": "always", "verify": True} if job.get("stepped") else {}
    report = load_into(run.model, job.get("topology"), folder / "checkpoint", optimizer=run.optimizer, **options)
    kept = {id(state["exp_avg"]) for state in stepping.state.values()}
    truth = load_file(folder / "truth.safetensors")
    wrong, compared = differing(run, truth)
    run.scheduler.last_epoch = case.steps
    after = [run.step(at) for at in range(case.steps, case.steps + 5)]
    facts = json.loads((folder / "truth.json").read_text())
    return {
        "wrong": wrong,
        "compared": compared,
        "states": len(report.states),
        "losses": after,
        "wanted": facts["losses_after"],
        "stepped": len(stepping.state),
        "reused": held <= kept if held else None,
        "read": report.nbytes_read,
        "total": report.nbytes_total,
    }


def compiled_and_checkpointed(model: torch.nn.Module) -> torch.nn.Module:
    """The model with one linear compiled, and one that is computed again."""
    model.l1 = checkpoint_wrapper(model.l1)
    model.l2 = torch.compile(model.l2, backend="eager")
    return model


def with_masters(run: torch_train.Run, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Load into DTensors in bfloat16 and masters of them in float32; what differs."""
    live = {torch_train._bare(name): own for name, own in run.model.named_parameters()}
    masters = {name: own.detach().clone().float() for name, own in live.items() if own.requires_grad}
    groups = [
        {"params": [own for name, own in masters.items() if torch_train._is_matrix(name) is is_matrix]}
        for is_matrix in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups)
    report = load_into(run.model, checkpoint=folder / "checkpoint", optimizer=optimizer, masters=masters)
    found = {f"{name}/weight": own for name, own in masters.items()}
    found |= {
        f"{name}/{state}": own for name, master in masters.items() for state, own in optimizer.state[master].items()
    }
    whole = {key: own.full_tensor() if hasattr(own, "full_tensor") else own for key, own in found.items()}
    truth = load_file(folder / "truth.safetensors")
    wrong, compared = unlike(whole, {key: truth[key] for key in whole})
    rounded = [
        name for name, own in live.items() if not torch.equal(own.full_tensor(), truth[f"{name}/weight"].bfloat16())
    ]
    return {"wrong": [*wrong, *rounded], "compared": compared, "notes": report.notes}


def fsdp1(model: torch.nn.Module, *, strategy: str, use_orig_params: bool, nested: bool) -> FullyShardedDataParallel:
    """FSDP1, two linears wrapped in it or none; on a mesh its state dicts are DTensors, which gather on a CPU."""
    shape, names = ((2, 2), ("replicate", "fsdp")) if "HYBRID" in strategy else ((dist.get_world_size(),), ("fsdp",))
    apart = [getattr(model, name) for name in ("l1", "l3", "block") if nested and hasattr(model, name)]
    if not use_orig_params and hasattr(model, "frozen"):  # which wants parameters alike within a wrapped module
        apart.append(model.frozen)
    found = FullyShardedDataParallel(
        model,
        use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=CustomPolicy(lambda own: own in apart),
        device_id=torch.device("cpu"),
        device_mesh=init_device_mesh("cpu", shape, mesh_dim_names=names),
    )
    FullyShardedDataParallel.set_state_dict_type(found, StateDictType.SHARDED_STATE_DICT)
    return found


def differing(run: torch_train.Run, truth: dict[str, torch.Tensor]) -> tuple[list[str], int]:
    """Entries of the truth that are not what the ranks hold together, and how many were compared."""
    if run.case.wrap == "fsdp1":
        return unlike(run._gathered()[0], truth)
    named = {bare(name): own for name, own in run.model.named_parameters()}
    named |= {name.removeprefix("module."): own for name, own in run.model.named_buffers()}
    wrong, compared = [], 0
    for key, wanted in truth.items():
        name, _, state = key.rpartition("/")
        if name not in named:
            assert name == "head.weight", name
            continue
        live = named[name]
        stepping = getattr(run.optimizer, "optim", run.optimizer)
        if state not in ("weight", "module") and live not in stepping.state:
            assert stepping is not run.optimizer  # another rank steps it
            continue
        own = live.detach() if state in ("weight", "module") else stepping.state[live][state]
        if state not in ("weight", "module", "step"):
            assert type(own) is type(live.detach())
            assert getattr(own, "placements", None) == getattr(live, "placements", None)
        whole = own.full_tensor() if hasattr(own, "full_tensor") else own
        compared += 1
        wrong += unlike({key: whole}, {key: wanted})[0]
    return wrong, compared


def bare(name: str) -> str:
    return torch_train._bare(name).removeprefix("module.").replace("_checkpoint_wrapped_module.", "")


def unlike(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> tuple[list[str], int]:
    """Names of tensors that are not those of the truth, and how many were compared."""
    wrong = [key for key in truth if key not in found and key != "head.weight/weight"]
    for key in found.keys() & truth.keys():
        whole, wanted, state = found[key], truth[key], key.rpartition("/")[2]
        is_alike = whole.dtype == wanted.dtype or state == "step"  # DeepSpeed counts in whole numbers
        if not is_alike or not torch.equal(whole, wanted.to(whole.dtype).reshape(whole.shape)):
            wrong.append(key)
    return wrong, len(found)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
