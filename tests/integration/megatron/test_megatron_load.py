"""Files that `ucp` wrote, loaded by real megatron-core on a CPU: every rank holds the truth, bit for bit.

Weights of the model, masters, both moments and the step are gathered from all ranks and compared with what the run that
made the source held. Sources are kept fixtures; releases of megatron-core are fetched. All loads of a release share a
process (`megatron_jobs.py`), so that everything is converted and loaded first, and then looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.megatron.megatron_jobs import FIXTURES, Load, Loaded, load_all
from ucp.api import convert
from ucp.errors import TopologyError, UcpError

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

KEPT = FIXTURES / "megatron"


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A source, what is made of it, and the job that loads that."""

    src: str
    to: str
    job: str
    version: str = "0.16.1"
    layout: str = "torch_dist"
    settings: dict[str, str] = field(default_factory=dict)
    fused_adam: bool = False
    anew: bool = False
    """Weights alone, loaded into an optimizer that starts anew."""
    zero: str | None = None
    """What DeepSpeed has of it on the way: a topology; empty for a universal checkpoint."""

    @property
    def truth(self) -> Path:
        return KEPT / "truth" / f"{self.src.partition('-')[0]}.safetensors"

    def __str__(self) -> str:
        by = "" if self.zero is None else f">{self.zero or 'universal'}"
        return f"{self.src}{by}>{self.layout}:{self.to}>{self.version}:{self.job.replace(' ', '-')}"

    def load(self, folder: Path, truth: Path | None = None) -> Load:
        return Load(
            name=folder.name,
            folder=folder,
            layout=self.job,
            release=self.version,
            truth=truth or self.truth,
            fused_adam=self.fused_adam,
            anew=self.anew,
        )


CONVERSIONS = [
    # torch_dist: one file, any layout
    Conversion(src="llama-tp2-dp2-dp", to="tp=2,pp=2", job="tp2 pp2"),
    Conversion(src="llama-tp2-dp2-dp", to="tp=2,pp=2", job="tp1"),
    Conversion(src="llama-tp2-dp2-dp", to="tp=2,pp=2", job="pp2 vpp2"),
    Conversion(src="llama-tp2-dp2-dp", to="tp=2,pp=2", job="dp2", version="0.19.2"),
    Conversion(src="llama-tp2-dp2-dp", to="tp=2,pp=2", job="tp2", version="0.15.3"),
    Conversion(src="llama-tp2-dp2-modelspace-0.13.1", to="tp=1", job="tp2"),
    Conversion(src="gpt-tp2-pp2-torch", to="tp=2", job="tp2 pp2", settings={"use_distributed_optimizer": "true"}),
    Conversion(src="gpt-dp4-dp", to="tp=2", job="tp2", settings={"use_distributed_optimizer": "false"}),
    Conversion(src="gpt-dp4-dp", to="pp=2,dp=2", job="pp2 dp2", version="0.19.2"),
    Conversion(src="qwen-tp4-torch-zero", to="tp=2,pp=2", job="tp2 pp2"),
    Conversion(src="mixtral-ep4-dp4-full", to="tp=2,ep=2,etp=1", job="tp2 ep2 etp1"),
    Conversion(src="mixtral-tp2-ep2-etp1-torch-zero", to="ep=4,dp=4", job="ep4 dp4"),
    Conversion(src="mixtral-tp2-ep2-etp1-torch-zero", to="tp=2,pp=2", job="dp2", version="0.19.2"),
    Conversion(src="deepseek-tp2-ep2-dp2-torch-zero", to="tp=2,pp=2", job="tp2 pp2"),
    Conversion(src="deepseek-ep2-dp2-full-singleton", to="tp=2", job="tp1", version="0.19.2"),
    Conversion(src="mamba-tp2-dp2-torch-zero", to="tp=4", job="tp4"),
    Conversion(src="mamba-tp2-dp2-torch-zero-0.19.2", to="tp=4", job="tp2", version="0.19.2"),
    # legacy files: their own layout
    Conversion(src="llama-tp2-dp2-dp", to="tp=2,pp=2", job="tp2 pp2", layout="torch"),
    Conversion(src="llama-tp2-pp2-dp2-full", to="pp=2,vpp=2", job="pp2 vpp2", layout="torch"),
    Conversion(src="llama-tp2-dp2-dp", to="tp=2,dp=2", job="tp2 dp2", layout="torch", version="0.19.2"),
    Conversion(src="llama-tp2-torch-fused", to="tp=4", job="tp4", layout="torch", fused_adam=True),
    Conversion(
        src="gpt-dp4-dp",
        to="pp=2,dp=2",
        job="pp2 dp2",
        layout="torch",
        settings={"overlap_grad_reduce": "true", "ddp_bucket_size": "3000"},
    ),
    Conversion(src="gpt-tp2-pp2-torch", to="tp=2", job="tp2", layout="torch"),
    Conversion(src="mixtral-ep4-dp4-full", to="tp=2,ep=2,etp=1", job="tp2 ep2 etp1", layout="torch"),
    Conversion(src="mixtral-pp2-ep2-dp2-dp", to="tp=2,pp=2", job="tp2 pp2", layout="torch"),
    Conversion(src="deepseek-ep2-dp2-full-singleton", to="tp=2,ep=2,etp=1", job="tp2 ep2 etp1", layout="torch"),
    Conversion(src="mamba-tp2-dp2-torch-zero", to="tp=4", job="tp4", layout="torch"),
    Conversion(src="qwen-tp2-dp2-dp-fused-buckets", to="tp=4", job="tp4", layout="torch", fused_adam=True),
]

SHIFTED = "gpt-tp2-pp2-dp2-full"
"""Saved with states that megatron-core had shifted."""

WEIGHTS = [
    Conversion(src=SHIFTED, to="tp=2", job="tp2", anew=True),
    Conversion(src=SHIFTED, to="pp=2", job="pp2", version="0.19.2", anew=True),
    Conversion(src="llama-tp2-dp2-dp", to="tp=2", job="tp2", layout="torch", anew=True),
]
"""Weights alone."""

FOREIGN = [
    Conversion(src="llama-tp2-dp2-dp", to="tp=2", job="tp2", zero="dp=2,zero=2"),
    Conversion(src="llama-tp2-dp2-dp", to="tp=2,pp=2", job="tp2 pp2", layout="torch", zero="dp=4,zero=3"),
    Conversion(src="llama-tp2-dp2-dp", to="pp=2,vpp=2", job="pp2 vpp2", zero=""),
]
"""Through DeepSpeed: names and regions are all that is left of Megatron in between."""

REFUSED = [
    ("llama-tp2-dp2-dp", "tp=16", "tp16", "num_attention_heads (8) must be a multiple"),
    (
        "llama-tp2-dp2-dp",
        "tp=8",
        "tp8",
        "not divisible by 2 when instantiating ColumnParallelLinear when instantiating MLP",
    ),
    ("llama-tp2-dp2-dp", "pp=3", "pp3", "num_layers should be divisible by pipeline_model_parallel_size"),
    ("llama-tp2-dp2-dp", "ep=2,dp=2", "ep2 dp2", "num_moe_experts must be non None"),
    ("mixtral-ep4-dp4-full", "ep=3,dp=3", "ep3 dp3", "num_moe_experts % ep_size == 0"),
    ("mamba-tp2-dp2-full", "pp=2,vpp=2", "pp2 vpp2", "does not currently support"),
]
"""A source, a layout, the same as a job, and what Megatron says."""

PADDED = [
    (rows, Conversion(src="llama-tp2-dp2-dp", to="tp=2", job="tp2", version=version))
    for rows in (56, 96)
    for version in ("0.15.3", "0.16.1", "0.19.2")
]
"""Rows that the run pads the vocabulary to, and the release that does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was converted and loaded."""

    loaded: Mapping[str, Loaded]
    """name of the folder -> what became of it"""
    notes: Mapping[str, tuple[str, ...]]
    """name of the folder -> what the conversion noted"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Convert everything, then load everything."""
    root = tmp_path_factory.mktemp("converted")
    loads: list[Load] = []
    notes: dict[str, tuple[str, ...]] = {}
    failed: dict[str, Loaded] = {}
    for conversion in [*CONVERSIONS, *WEIGHTS, *FOREIGN]:
        folder = root / name_of(conversion)
        try:
            notes[folder.name] = written(conversion, folder)
        except UcpError as error:
            failed[folder.name] = Loaded(error=f"not written: {error}")
        else:
            loads.append(conversion.load(folder))
    for rows, conversion in PADDED:
        folder = root / name_of(conversion, rows)
        notes[folder.name] = written(conversion, folder, padded_vocab_size=str(rows))
        loads.append(conversion.load(folder, padded(conversion.truth, rows, root / f"{folder.name}.safetensors")))
    for src, to, job, _ in REFUSED:
        conversion = Conversion(src=src, to="ep=2,dp=2" if "ep=3" in to else "tp=1", job=job)
        written(conversion, root / f"at-{job.replace(' ', '-')}")
        loads.append(conversion.load(root / f"at-{job.replace(' ', '-')}"))
    shifted = Conversion(src=SHIFTED, to="", job="tp2 pp2 dp2")
    loads.append(replace(shifted.load(KEPT / SHIFTED / "checkpoint"), name=SHIFTED))
    return Outcome(loaded=failed | load_all(loads, root / "results"), notes=notes)


def name_of(conversion: Conversion, rows: int = 0) -> str:
    name = str(conversion).replace(">", "-to-").replace(":", "-").replace("=", "").replace(",", "-")
    return (
        f"{name}-{rows}-rows"
        if rows
        else f"{name}{'-set' if conversion.settings else ''}{'-anew' if conversion.anew else ''}"
    )


def written(conversion: Conversion, folder: Path, **settings: str) -> tuple[str, ...]:
    """Write it, by way of DeepSpeed where that is asked for; what the report notes."""
    src, dtypes = KEPT / conversion.src / "checkpoint", {}
    settings = {**conversion.settings, **settings}
    if conversion.zero is not None:
        between = folder.with_name(f"{folder.name}-between")
        convert(
            src,
            between,
            to="deepspeed" if conversion.zero else "deepspeed-universal",
            topology=conversion.zero or None,
            workers=1,
        )
        src, dtypes = between, {"weight": "bfloat16"}
        settings |= {"num_attention_heads": "8", "transformer_impl": "local", "override_opt_param_scheduler": "true"}
    report = convert(
        src,
        folder,
        to="megatron",
        topology=conversion.to,
        layout=conversion.layout,
        settings=settings,
        dtypes=dtypes,
        include=["*/weight"] if conversion.anew else ["*"],
        workers=1,
    )
    return tuple(report.notes)


def padded(truth: Path, rows: int, path: Path) -> Path:
    """The truth of a run whose vocabulary has other rows: those that are left out are gone, those added are zeros."""
    found = load_file(truth)
    own = [key for key in found if key.startswith(("embedding.", "output_layer."))]
    assert len(own) == 8
    for key in own:
        wanted = torch.zeros(rows, found[key].shape[1], dtype=found[key].dtype)
        wanted[: len(found[key])] = found[key][:rows]
        found[key] = wanted
    save_file(found, path)
    return path


def check(found: Loaded) -> None:
    assert not found.error
    assert found.tensors >= 60
    assert found.differences == ()


@pytest.mark.parametrize("conversion", CONVERSIONS, ids=str)
def test_megatron_holds_the_truth(conversion: Conversion, outcome: Outcome) -> None:
    check(outcome.loaded[name_of(conversion)])


@pytest.mark.parametrize("conversion", WEIGHTS, ids=str)
def test_an_optimizer_that_starts_anew(conversion: Conversion, outcome: Outcome) -> None:
    assert any("--no-load-optim" in note for note in outcome.notes[name_of(conversion)])
    check(outcome.loaded[name_of(conversion)])


def test_megatron_resumes_from_shifted_states_without_a_word(outcome: Outcome) -> None:
    """That is why they are left out: nothing of the embedding but its weight is what it was."""
    found = outcome.loaded[SHIFTED]
    assert not found.error
    assert [line.partition(":")[0] for line in found.differences] == [
        f"embedding.word_embeddings.weight/{state}" for state in ("exp_avg", "exp_avg_sq", "weight")
    ]


@pytest.mark.parametrize("conversion", FOREIGN, ids=str)
def test_a_run_of_deepspeed_goes_on_in_megatron(conversion: Conversion, outcome: Outcome) -> None:
    """Megatron to DeepSpeed and back: names and regions are all that is left of Megatron in between."""
    check(outcome.loaded[name_of(conversion)])


@pytest.mark.parametrize(("src", "to", "ranks", "says"), REFUSED, ids=lambda own: own.replace(" ", "-"))
def test_layouts_that_megatron_refuses_too(src, to, ranks, says, outcome, tmp_path):
    """A file for one rank loads at any layout that Megatron starts at: at these it does not start."""
    with pytest.raises(TopologyError, match="as Megatron does"):
        convert(KEPT / src / "checkpoint", tmp_path / "refused", to="megatron", topology=to, workers=1)
    assert says in outcome.loaded[f"at-{ranks.replace(' ', '-')}"].error


@pytest.mark.parametrize(("rows", "conversion"), PADDED, ids=str)
def test_another_padding_of_the_vocabulary(rows: int, conversion: Conversion, outcome: Outcome) -> None:
    """Megatron drops rows that its own padding has no place for, and fills those it adds with zeros, in every state."""
    name = name_of(conversion, rows)
    assert any(f"64 rows here and {rows} in the run" in note for note in outcome.notes[name])
    check(outcome.loaded[name])
