"""Load checkpoints live into engines of real DeepSpeed, one after another; each then saves one, and trains on.

    torchrun --nproc-per-node 2 tests/integration/deepspeed/live_worker.py JOBS.json

A job names the case to build the engine of, what to load, and what to pass to `ucp.load_into`: the engine (`engine`),
the engine as optimizer of its module (`optimizer`), the engine without states (`weights`), its module (`module`) or its
module with its optimizer (`apart`); topology and rules where ranks share layers. Instead of a load a job can train
(`trained`) or resume with DeepSpeed itself (`resumed`). An engine is also saved with `ucp.save`. Rank 0 writes
`OUT/report.json`: losses, or the error; the report.
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

import deepspeed  # noqa: E402
import deepspeed_train as train  # noqa: E402
from deepspeed_cases import CASES, case_from_json  # noqa: E402
from deepspeed_parallel import checkpoint_info  # noqa: E402
from deepspeed_run import Run, start  # noqa: E402

import ucp  # noqa: E402

SEED = 1
"""Of the initial weights: the checkpoints were trained from seed 0."""


def main() -> None:
    """Carry out all jobs of the file."""
    for job in json.loads(Path(sys.argv[1]).read_text()):
        told = _carry_out(job)
        if deepspeed.comm.get_rank() == 0:
            out = Path(job["out"])
            out.mkdir(parents=True, exist_ok=True)
            (out / "report.json").write_text(json.dumps(told))
        gc.collect()
        deepspeed.comm.barrier()
    sys.stdout.flush()
    os._exit(0)  # the threads of DeepSpeed's shared-memory communicator sometimes abort a normal exit


def _carry_out(job: dict[str, Any]) -> dict[str, object]:
    case = case_from_json(CASES[job["base"]], job["case"])
    passed = job["passed"]
    run = start(case, seed=0 if passed == "trained" else SEED, universal=False)
    engine = run.engine
    try:
        report = _fill(run, job)
        steps = engine.global_steps
        if passed in ("engine", "trained") and not job["patterns"]:
            like = job["checkpoint"] if job["topology"] else None
            ucp.save(engine, None, job["topology"] or None, Path(job["out"]) / "store", like=like)
        told = {"universal_checkpoint_info": checkpoint_info(case.tensor_parallel_size)} if case.kind == "3d" else {}
        engine.save_checkpoint(Path(job["out"]) / "saved", client_state=told)
        after = train._steps(run, 5)
        if passed == "trained" and case.kind == "moe":
            _save_chain(engine, Path(job["out"]))
        told = {} if report is None else {"text": str(report), "notes": report.notes}
        return {"losses": after.losses, "steps": steps, **told}
    except ucp.UcpError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        engine.destroy()


def _save_chain(engine: Any, out: Path) -> None:
    """Add some experts, as they are now, to a chain that begins with the store saved before."""
    if deepspeed.comm.get_rank() == 0:
        (out / "chain.json").write_text('{"version": 1, "links": [{"path": "store", "iteration": 3}]}')
    deepspeed.comm.barrier()
    ucp.save(engine, None, None, out / "later", plan=ucp.PartialExperts(2), chain=True)
    engine.save_checkpoint(out / "saved-later")


def _fill(run: Run, job: dict[str, Any]) -> ucp.LoadReport | None:
    """Train, resume with DeepSpeed, or load live; the report of the last."""
    engine = run.engine
    if job["passed"] == "trained":
        train._steps(run, 3)
        return None
    if job["passed"] == "resumed":
        found, _ = engine.load_checkpoint(job["checkpoint"])
        assert found is not None
        return None
    model, optimizer = {
        "engine": (engine, None),
        "optimizer": (engine.module, engine),
        "weights": (engine, False),
        "module": (engine.module, None),
        "apart": (engine.module, engine.optimizer),
    }[job["passed"]]
    asked = {"topology": job["topology"] or None, "patterns": job["patterns"] or None}
    return ucp.load_into(model, checkpoint=job["checkpoint"], optimizer=optimizer, **asked)


if __name__ == "__main__":
    main()
