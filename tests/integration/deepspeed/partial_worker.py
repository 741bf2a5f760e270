"""Load checkpoints that lack optimizer states with real DeepSpeed, and say how each load and the next step went.

    torchrun --nproc-per-node 1 tests/integration/deepspeed/partial_worker.py JOBS.json OUT.json

A job is one fresh engine of another initial seed, which loads a checkpoint with the options given. OUT has a report for
each: what the load and the step raised, which weights and masters are not the source's, and what states there are.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

_FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"
sys.path.insert(0, str(_FIXTURES / "make" / "deepspeed"))

import torch  # noqa: E402
from deepspeed_cases import CASES, case_from_json  # noqa: E402
from deepspeed_run import start  # noqa: E402
from deepspeed_truth import gather  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

SEED = 1
"""Of the initial weights: the checkpoints were trained from seed 0."""


def main() -> None:
    """Carry out all jobs of the file."""
    reports = []
    for job in json.loads(Path(sys.argv[1]).read_text()):
        reports.append(_carried_out(job))
        gc.collect()
    Path(sys.argv[2]).write_text(json.dumps(reports, indent=1))
    os._exit(0)  # the threads of DeepSpeed's shared-memory communicator sometimes abort a normal exit


def _carried_out(job: dict[str, Any]) -> dict[str, Any]:
    run = start(case_from_json(CASES[job["base"]], job["case"]), seed=SEED, universal=job["universal"])
    report: dict[str, Any] = {
        "load": "",
        "step": "",
        "wrong": [],
        "masters": "",
        "states": [],
        "decays": [],
        "named": False,
    }
    try:
        path, _ = run.engine.load_checkpoint(job["checkpoint"], **job["options"])
        report["load"] = "" if path else "nothing found"
        _compare(report, run.engine, load_file(job["truth"]))
    except Exception as error:  # noqa: BLE001  # a refusal by DeepSpeed is a result
        report["load"] = f"{type(error).__name__}: {error}"
    if not report["load"]:
        try:
            run.step()
        except Exception as error:  # noqa: BLE001  # the same
            report["step"] = f"{type(error).__name__}: {error}"
    run.engine.destroy()
    return report


def _compare(report: dict[str, Any], engine: Any, truth: dict[str, torch.Tensor]) -> None:
    """Fill in what of trained parameters differs from the truth."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    report["states"] = sorted({key for state in inner.state.values() for key in state})
    report["decays"] = [group["weight_decay"] for group in inner.param_groups]
    report["named"] = any("param_names" in group for group in inner.param_groups)
    trained = [key for key in truth if key.endswith("/weight") and truth[key].numel()]
    try:
        found = gather(engine).tensors
    except AssertionError:
        report["masters"] = "are not those of the weights"
        return
    modules = [key.removesuffix("/weight") + "/module" for key in trained]
    report["wrong"] = [key for key in modules if not torch.equal(found[key], truth[key])]
    differing = [key for key in trained if not torch.equal(found[key], truth[key])]
    report["masters"] = f"{len(differing)} differ" if differing else ""


if __name__ == "__main__":
    main()
