"""Kept DeepSpeed checkpoints in live models: equal bit for bit to the truth, and training goes on from there.

No DeepSpeed is needed: the model of the fixtures is plain torch, stepped by torch's own optimizers.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn, optim

import ucp
from ucp.errors import CorruptError, LoadError
from ucp.live.load import load_into

FIXTURES = Path(__file__).parents[3] / "fixtures"
ROOT = FIXTURES / "deepspeed"
sys.path.insert(0, str(FIXTURES / "make" / "deepspeed"))

from deepspeed_model import TinyModel, build_model, global_batch, next_token_loss  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")

ADAMS = ("adamw", "client-adamw", "fused-adam", "cpu-adam")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

TOLERANCE = 1e-5
"""Largest relative difference of a loss. DeepSpeed sums gradients over ranks and flat buffers in another order than one
process does: some 1e-7 in fp32, which five steps amplify."""


def report_of(case):
    return json.loads((ROOT / case / "truth.json").read_text())


def loadable():
    for path in sorted(ROOT.glob("*/truth.json")):
        case = json.loads(path.read_text())["case"]
        if case["kind"] == "module" and "elastic" not in case["name"]:
            yield case["name"]


CASES = list(loadable())
WHOLE = [case for case in CASES if not report_of(case)["case"]["exclude_frozen"]]
GOING_ON = [
    case
    for case in WHOLE
    if report_of(case)["case"]["dtype"] == "fp32" and report_of(case)["case"]["optimizer"] in (*ADAMS, "sgd")
]


class AnyOptimizer(optim.Optimizer):
    """Stands for an optimizer that torch does not have: it takes whatever there is."""

    def __init__(self, groups) -> None:
        super().__init__(groups, {"lr": 9.0, "weight_decay": 9.0})


class Run:
    """A model and an optimizer as a script would make them, and the truth of what they should become."""

    def __init__(self, case, dtype=torch.float32) -> None:
        self.folder = ROOT / case
        self.report = report_of(case)
        self.truth = load_file(self.folder / "truth.safetensors")
        self.case = self.report["case"]
        self.model = build_model(scale="tiny", seed=1, omit=frozenset(self.case["omit"]))
        assert isinstance(self.model, TinyModel)
        self.model.to(dtype)
        self.model.drift = self.model.drift.to(self.truth["drift/module"].dtype)
        self.optimizer = self._optimizer()

    @property
    def checkpoint(self) -> Path:
        own = self.folder / "checkpoint"
        return own if own.is_dir() else next(self.folder.glob("checkpoint-*"))

    def _optimizer(self):
        trained = [param for param in self.model.parameters() if param.requires_grad]
        groups = [{"params": trained}]
        if self.case["groups"] == 2:
            groups = [
                {"params": [p for p in trained if p.ndim >= 2]},
                {"params": [p for p in trained if p.ndim < 2]},
            ]
        if self.case["optimizer"] in ADAMS:
            return optim.AdamW(groups, lr=9.0)
        return optim.SGD(groups, lr=9.0) if self.case["optimizer"] == "sgd" else AnyOptimizer(groups)

    def check(self) -> None:
        """Raise unless every weight, buffer, state, step and hyper-parameter is that of the truth."""
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        for key, wanted in self.truth.items():
            name, _, state = key.rpartition("/")
            if state == "module" and f"{name}/weight" in self.truth:
                continue
            if state in ("weight", "module"):
                check_equal(key, tensors[name], wanted.to(tensors[name].dtype))
            else:
                own = self.optimizer.state[tensors[name]][state]
                check_equal(key, own, wanted.to(own.dtype))
        for group, saved in zip(self.optimizer.param_groups, self.report["groups"], strict=True):
            restored = {key: group[key] for key in ("lr", "weight_decay", "eps", "momentum") if key in group}
            assert restored == {key: saved["hyperparameters"].get(key, "not saved") for key in restored}
            for name in saved["names"]:
                if self.case["optimizer"] in ADAMS and tensors[name].numel():
                    step = self.optimizer.state[tensors[name]]["step"]
                    assert (step.dtype, float(step)) == (torch.float32, saved["step"])

    def go_on(self) -> list[float]:
        """Losses of the next steps, taken as the run took them: the whole batch, clipped to a norm of 1."""
        losses = []
        for number, rates in enumerate(self.report["lrs_after"]):
            tokens = global_batch(step=self.report["step"] + number, shape=self.model.batch_shape)
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            self.optimizer.zero_grad()
            loss = next_token_loss(self.model(tokens), tokens)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            losses.append(float(loss.detach()))
        return losses


def check_equal(key, found, wanted) -> None:
    assert found.dtype == wanted.dtype, key
    assert torch.equal(found.detach(), wanted), key


@pytest.mark.parametrize("case", WHOLE)
def test_everything_is_equal_to_the_truth(case):
    run = Run(case)
    report = load_into(run.model, checkpoint=run.checkpoint, optimizer=run.optimizer)
    run.check()
    assert report.step == run.report["step"]
    assert set(report.names) == {key.rpartition("/")[0] for key in run.truth}
    assert run.model.head.weight is run.model.emb.weight
    assert not report.problems
    assert not report.missing


@pytest.mark.parametrize("case", [case for case in WHOLE if report_of(case)["case"]["dtype"] != "fp32"])
def test_a_low_precision_model_gets_the_weights_that_deepspeed_computed_with(case):
    run = Run(case, DTYPES[report_of(case)["case"]["dtype"]])
    load_into(run.model, checkpoint=run.checkpoint)
    tensors = {**dict(run.model.named_parameters()), **dict(run.model.named_buffers())}
    for key, wanted in run.truth.items():
        if key.endswith("/module"):
            check_equal(key, tensors[key.removesuffix("/module")], wanted)


@pytest.mark.parametrize("case", GOING_ON)
def test_training_goes_on_with_the_losses_of_the_uninterrupted_run(case):
    run = Run(case)
    load_into(run.model, checkpoint=run.checkpoint, optimizer=run.optimizer)
    assert run.go_on() == pytest.approx(run.report["losses_after"], rel=TOLERANCE)


def test_there_are_cases_of_every_kind():
    assert len(WHOLE) > 25
    assert {report_of(case)["case"]["stage"] for case in GOING_ON} == {0, 1, 2, 3}


@pytest.mark.parametrize("case", [case for case in CASES if case not in WHOLE])
def test_frozen_weights_that_were_not_saved_are_missing(case):
    run = Run(case)
    before = run.model.frozen.weight.clone()
    with pytest.raises(LoadError, match=r"1 tensor .*:\n  frozen\.weight"):
        load_into(run.model, checkpoint=run.checkpoint, optimizer=run.optimizer)
    report = load_into(run.model, checkpoint=run.checkpoint, optimizer=run.optimizer, strict=False)
    assert report.missing == ("frozen.weight",)
    assert torch.equal(run.model.frozen.weight, before)


@pytest.mark.parametrize("options", [{}, {"layout": "per-parameter"}, {"compress": True}, {"virtual": True}])
def test_a_store_of_any_kind_gives_the_same(tmp_path, options):
    run = Run("z3-dp3-uneven")
    ucp.convert(run.checkpoint, tmp_path / "atoms", workers=1, **options)
    report = load_into(run.model, checkpoint=tmp_path / "atoms", optimizer=run.optimizer)
    run.check()
    assert report.format == "ucp"
    assert not report.unchecked


def test_damage_in_a_compressed_store_is_found(tmp_path):
    run = Run("z3-dp3-uneven")
    ucp.convert(run.checkpoint, tmp_path / "atoms", workers=1, compress=True)
    pack = max((tmp_path / "atoms").glob("packs/*"), key=lambda path: path.stat().st_size)
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    with pytest.raises(CorruptError):
        load_into(run.model, checkpoint=tmp_path / "atoms", optimizer=run.optimizer)
