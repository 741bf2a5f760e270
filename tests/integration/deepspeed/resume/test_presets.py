"""Each preset of AutoEP: a run of a transformers model goes on at another ep, dp and stage, with the same losses.

From native files, from a universal folder, and live by `ucp.load_into`. The Python with transformers and DeepSpeed in
it is that of UCP_TRANSFORMERS.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import ucp
from ucp.core.topology import Topology

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1200)]

WORKER = Path(__file__).with_name("presets_worker.py")
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")
"""Models whose experts also go to Hugging Face's files and back."""


def launch(jobs: list[dict[str, object]], ranks: int, folder: Path) -> None:
    interpreter = os.environ.get("UCP_TRANSFORMERS")
    if interpreter is None:
        pytest.skip("needs DeepSpeed and transformers in one environment, where UCP_TRANSFORMERS says")
    for job in jobs:
        Path(str(job["out"])).mkdir()
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [interpreter, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(WORKER)]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, str(folder / "jobs.json")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("model", [*FAMILIES, "qwen3_5_moe_text"])
def test_a_run_goes_on(model: str, tmp_path: Path) -> None:
    job = {"model": model, "stage": 1, "ep": 2, "checkpoint": None, "way": "", "out": str(tmp_path / "run")}
    launch([job], 2, tmp_path)
    source, written = tmp_path / "run" / "checkpoint", {way: tmp_path / way for way in ("native", "universal")}
    ucp.convert(source, written["native"], to="deepspeed", topology=Topology(dp=4, ep=4, zero=2))
    ucp.convert(source, written["universal"], to="deepspeed-universal")
    assert ucp.diff(source, written["native"]).equal
    assert ucp.diff(source, written["universal"]).equal
    paths = {**written, "live": source}
    jobs = [
        {**job, "stage": 2, "ep": 4, "checkpoint": str(path), "way": way, "out": str(tmp_path / f"{way}-out")}
        for way, path in paths.items()
    ]
    launch(jobs, 4, tmp_path)
    losses = json.loads((tmp_path / "run" / "losses.json").read_text())
    for way in paths:
        assert json.loads((tmp_path / f"{way}-out" / "losses.json").read_text()) == pytest.approx(losses, rel=1e-5), way
    if model in FAMILIES:
        there, back = tmp_path / "there", tmp_path / "back"
        ucp.convert(source, tmp_path / "files", to="huggingface", settings={"config": str(tmp_path / "run")})
        ucp.convert(source, there, names="huggingface")
        ucp.convert(there, back, to="deepspeed", names="autoep", topology="dp=4,ep=4,zero=3")
        assert ucp.diff(source, back).equal
