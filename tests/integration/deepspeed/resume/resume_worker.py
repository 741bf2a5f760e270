"""Load checkpoints with real DeepSpeed, one after another in one process group, and say what came back.

    torchrun --nproc-per-node 2 tests/integration/deepspeed/resume/resume_worker.py JOBS.json

A job is one fresh engine of another initial seed: it loads a checkpoint with `load_checkpoint`, or live with
`ucp.load_into` (and then saves one), gathers the truth of what it then holds, trains on, and writes `truth.json` and
`truth.safetensors` as deepspeed_train.py does, or `error.json`. Starting Python, torch and DeepSpeed takes ten times as
long as a job, hence many jobs in a process.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FIXTURES = Path(__file__).resolve().parents[4] / "fixtures"
sys.path.insert(0, str(_FIXTURES / "make" / "deepspeed"))

import deepspeed  # noqa: E402
import deepspeed_train as train  # noqa: E402
import torch  # noqa: E402
from deepspeed_cases import CASES, case_from_json  # noqa: E402
from deepspeed_run import start  # noqa: E402
from deepspeed_truth import gather  # noqa: E402

import ucp  # noqa: E402

STEPS = 5
SEED = 1
"""Of the initial weights: the checkpoints were trained from seed 0."""


def main() -> None:
    """Carry out all jobs of the file."""
    jobs = json.loads(Path(sys.argv[1]).read_text())
    for job in jobs:
        try:
            _carry_out(job)
        except Exception as error:  # noqa: BLE001  # a refusal by DeepSpeed is a result
            _write_error(Path(job["out"]), error)
        gc.collect()
        deepspeed.comm.barrier()
    sys.stdout.flush()
    os._exit(0)  # the threads of DeepSpeed's shared-memory communicator sometimes abort a normal exit


def _carry_out(job: dict[str, Any]) -> None:
    case = case_from_json(CASES[job["base"]], job["case"])
    run = start(case, seed=SEED, universal=job["universal"])
    engine = run.engine
    try:
        client_state = (_load_live if job["live"] else _load)(engine, job["checkpoint"], strict=not case.exclude_frozen)
        truth = gather(engine)
        report = train._report(case, engine, truth)
        report["client_state_keys"] = sorted(client_state)
        if job["live"]:
            engine.save_checkpoint(Path(job["out"]) / "saved")
        if job["unmanaged_from"]:
            train._restore_unmanaged(engine.module, Path(job["unmanaged_from"]))
        if job["mended"]:
            _mend(engine)
        after = train._steps(run, STEPS)
        report["step_after"] = _step_of(engine)
        train._write(Path(job["out"]), engine, truth, report, after)
    finally:
        engine.destroy()


def _load(engine: Any, path: str, *, strict: bool) -> Mapping[str, object]:
    found, client_state = engine.load_checkpoint(path, load_module_strict=strict)
    if found is None:
        raise FileNotFoundError(f"DeepSpeed found no checkpoint in {path}")
    return client_state


def _load_live(engine: Any, path: str, *, strict: bool) -> Mapping[str, object]:
    report = ucp.load_into(engine, checkpoint=path, strict=strict)
    if deepspeed.comm.get_rank() == 0:
        print(report)
    return ucp.open(path).extras.get("client_state", {})


def _mend(engine: Any) -> None:
    """Put right what the universal loader of stage 3 leaves wrong in 0.19.8, as docs/reference/resume-matrix.md tells.

    All sub-groups have one step tensor, and all groups the rates of the first.
    """
    for state in engine.optimizer.optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()
    if engine.lr_scheduler is not None:
        engine.lr_scheduler.step(engine.lr_scheduler.last_batch_iteration)


def _step_of(engine: Any) -> float | None:
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    steps = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
    return max(steps, default=None)


def _write_error(out: Path, error: Exception) -> None:
    if deepspeed.comm.get_rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        report = {"type": type(error).__name__, "message": str(error), "where": traceback.format_exc()}
        (out / "error.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
