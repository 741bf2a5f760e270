"""Every message on the page about troubleshooting is one that a command prints."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from tests.golden.truth import load_stubbed
from ucp import SparseWindow, UcpError, load_into, save
from ucp_cli.verbs import cli

ROOT = Path(__file__).resolve().parents[4]
PAGE = ROOT / "docs" / "how-to" / "troubleshooting.md"
ROW = re.compile(r"^\| `(.+?)` \|", re.MULTILINE)

Case = Callable[[], tuple[str, ...]]
CASES: dict[str, Case] = {}
"""What produces a message: it damages copies in the current folder, and returns a command."""

FIXTURES = {
    "deepspeed": "deepspeed/z3-dp4-bf16/checkpoint",
    "elastic": "deepspeed/z1-dp2-elastic/checkpoint",
    "experts": "deepspeed/z1-ep2/checkpoint",
    "fsdp": "torch/fsdp2-dp4/checkpoint",
    "megatron": "megatron/llama-tp2-pp2-dp2-full/checkpoint",
    "mixed": "deepspeed/z1-dp4-bf16/checkpoint",
    "model": "huggingface/llama/model",
    "shards": "huggingface/llama-sharded/model",
    "moe": "huggingface/mixtral/model",
}
OPTIMIZER = "deepspeed/global_step3/bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"


def produces(message: str) -> Callable[[Case], Case]:
    """Register what produces a message of the page."""

    def register(case: Case) -> Case:
        CASES[message] = case
        return case

    return register


def copy(*names: str) -> None:
    """Copy fixtures to the current folder, under their names here."""
    for name in names:
        shutil.copytree(ROOT / "fixtures" / FIXTURES[name], name)


def run(*words: str) -> None:
    """Run a command that succeeds."""
    assert CliRunner().invoke(cli, words).exit_code == 0


def convert(source: str, *options: str) -> tuple[str, ...]:
    """A command that converts a fixture."""
    copy(source)
    return ("convert", source, "out", *options)


def save_numbered(*, zero: bool = False) -> None:
    """A file of torch.save whose optimizer has no names: in an order that shapes do not tell, or without moments."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params if zero else [params[2], params[0], params[3], params[1]])
    for _ in range(3):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
    for state in optimizer.state.values() if zero else ():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "run.pt")


@produces("expected a checkpoint of ...; ... is none of them")
def empty_folder() -> tuple[str, ...]:
    Path("empty").mkdir()
    return ("inspect", "empty")


@produces("holds 2 checkpoints and no file 'latest' that names one; pass one of them")
def two_tags() -> tuple[str, ...]:
    copy("deepspeed")
    shutil.copytree("deepspeed/global_step3", "deepspeed/global_step6")
    Path("deepspeed/latest").unlink()
    return ("inspect", "deepspeed")


@produces("expected a file at ...; got only the files of items. torch writes it last: the checkpoint was not finished")
def save_was_killed() -> tuple[str, ...]:
    copy("fsdp")
    Path("fsdp/.metadata").unlink()
    return ("inspect", "fsdp")


@produces("is an unfinished conversion to ...; finish it with")
def reads_an_unfinished_conversion() -> tuple[str, ...]:
    copy("deepspeed")
    run("convert", "deepspeed", "out")
    Path("out").rename("out.ucp-partial")
    Path("out.ucp-partial/journal.jsonl").touch()  # it is removed last
    return ("inspect", "out.ucp-partial")


@produces("problem with the files of ... missing: ... (rank 2 of 4)")
def lost_rank() -> tuple[str, ...]:
    copy("deepspeed")
    Path(OPTIMIZER).unlink()
    return ("convert", "deepspeed", "out")


@produces("not a whole zip archive")
def truncated() -> tuple[str, ...]:
    copy("deepspeed")
    Path(OPTIMIZER).write_bytes(Path(OPTIMIZER).read_bytes()[:4000])
    return ("convert", "deepspeed", "out")


@produces("of 4 files that .metadata refers to not found in")
def lost_items() -> tuple[str, ...]:
    copy("fsdp")
    Path("fsdp/__1_0.distcp").unlink()
    return ("convert", "fsdp", "out")


@produces("missing: model-00002-of-00002.safetensors, which model.safetensors.index.json names")
def unfinished_download() -> tuple[str, ...]:
    copy("shards")
    Path("shards/model-00002-of-00002.safetensors").unlink()
    return ("convert", "shards", "out")


@produces("CRC-32 differs in 1 record: these bytes are not those that were written")
def flipped_bit() -> tuple[str, ...]:
    copy("deepspeed")
    with zipfile.ZipFile(OPTIMIZER) as archive:
        largest = max(
            (info for info in archive.infolist() if "/data/" in info.filename), key=lambda info: info.file_size
        )
    data = bytearray(Path(OPTIMIZER).read_bytes())
    sizes = data[largest.header_offset + 26 : largest.header_offset + 30]
    start = largest.header_offset + 30 + int.from_bytes(sizes[:2], "little") + int.from_bytes(sizes[2:], "little")
    data[start] ^= 1
    Path(OPTIMIZER).write_bytes(data)
    return ("convert", "deepspeed", "out")


@produces("expected the files of two ranks to differ")
def copied_rank() -> tuple[str, ...]:
    copy("deepspeed")
    shutil.copy(OPTIMIZER, OPTIMIZER.replace("rank_2", "rank_1"))
    return ("convert", "deepspeed", "out")


@produces("of another run: ... differs from")
def other_step() -> tuple[str, ...]:
    copy("deepspeed")
    state = load_stubbed(Path(OPTIMIZER))
    state["optimizer_state_dict"]["zero_stage"] = 3  # an enum of DeepSpeed, which need not be installed
    for states in state["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
        states["step"] = states["step"] + 1
    torch.save(state, OPTIMIZER)
    return ("convert", "deepspeed", "out")


@produces("holds copies that should be equal and are not")
def drifted() -> tuple[str, ...]:
    copy("mixed")
    file = "mixed/global_step3/mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=False)
    state["module"]["l1.weight"] += 1
    torch.save(state, file)
    return ("convert", "mixed", "out")


@produces("missing: files of experts")
def lost_expert() -> tuple[str, ...]:
    copy("experts")
    Path("experts/global_step3/layer_0_expert_1_mp_rank_00_model_states.pt").unlink()
    return ("convert", "experts", "out")


@produces("expected moments that are not zero, as steps were taken")
def lost_moments() -> tuple[str, ...]:
    save_numbered(zero=True)
    return ("convert", "run.pt", "out", "--to", "dcp")


@produces("is a virtual store, and files that it refers to have changed")
def changed_source() -> tuple[str, ...]:
    copy("deepspeed")
    run("convert", "deepspeed", "store", "--virtual")
    shutil.copy(OPTIMIZER, "other")
    shutil.copy("other", OPTIMIZER)
    return ("verify", "store")


@produces("was written by DeepSpeed with a layout that cannot be read")
def elastic() -> tuple[str, ...]:
    return convert("elastic")


@produces("is quantised (config.json: ...)")
def quantised() -> tuple[str, ...]:
    copy("model")
    Path("model/config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    return ("convert", "model", "out")


@produces("the optimizer numbers its parameters, and shapes do not tell which parameter number 0 is")
def numbered() -> tuple[str, ...]:
    save_numbered()
    return ("convert", "run.pt", "out", "--to", "dcp")


@produces("the optimizer has ... parameters that the model lacks")
def half() -> tuple[str, ...]:
    copy("fsdp")
    run("convert", "fsdp", "halves", "--to", "dcp", "--set", "style=accelerate")
    return ("inspect", "halves/optimizer_0")


@produces("expected the ZeRO stage of the run that will load the files")
def no_stage() -> tuple[str, ...]:
    return convert("deepspeed", "--to", "deepspeed", "--topology", "dp=2")


@produces("expected axis=degree with one of")
def mistyped_topology() -> tuple[str, ...]:
    return convert("deepspeed", "--topology", "dp2")


@produces("expected a topology that divides the model into equal parts")
def uneven() -> tuple[str, ...]:
    return convert("model", "--to", "megatron", "--topology", "tp=3")


@produces("transformers needs a config.json to load a model, and ... has none")
def no_config() -> tuple[str, ...]:
    return convert("deepspeed", "--to", "huggingface")


@produces("expected names that a model family has")
def unknown_names() -> tuple[str, ...]:
    return convert("deepspeed", "--to", "megatron", "--topology", "tp=2")


@produces("nothing records how many groups the model has")
def unknown_sizes() -> tuple[str, ...]:
    copy("megatron")
    run("convert", "megatron", "named", "--to", "dcp", "--names", "huggingface", "--topology", "dp=2")
    return ("convert", "named", "out", "--to", "megatron", "--topology", "tp=2")


@produces("expected every parameter that each model of the family")
def part_of_a_family() -> tuple[str, ...]:
    copy("model")
    run("convert", "model", "part", "--to", "dcp", "--exclude", "*norm.weight")
    heads = ("--set", "num_attention_heads=4", "--set", "num_key_value_heads=2")
    return ("convert", "part", "out", "--to", "dcp", "--names", "torchtitan", *heads)


@produces("the model is not of the family")
def wrong_family() -> tuple[str, ...]:
    return convert("megatron", "--family", "gpt")


@produces("expected optimizer groups and states, because ZeRO stage 1 loads weights from the optimizer files")
def weights_alone() -> tuple[str, ...]:
    return convert("model", "--to", "deepspeed", "--topology", "dp=2,zero=1")


@produces("expected parameters in the order of the model, because DeepSpeed's optimizer files hold no names")
def unknown_order() -> tuple[str, ...]:
    return convert("moe", "--to", "deepspeed", "--topology", "dp=2,zero=1", "--optimizer", "zero")


@produces("expected one step for all parameters of an optimizer group")
def steps_differ() -> tuple[str, ...]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        model[0].requires_grad_(step > 0)
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "run.pt")
    return ("convert", "run.pt", "out", "--to", "deepspeed", "--topology", "dp=2,zero=1")


@produces("has no such setting (--set)")
def unknown_setting() -> tuple[str, ...]:
    return convert("deepspeed", "--to", "deepspeed", "--topology", "dp=2,zero=1", "--set", "stage=1")


@produces("expected a memory budget of at least")
def no_memory() -> tuple[str, ...]:
    return convert("deepspeed", "--memory", "1M")


@produces("is not empty; choose another folder, or pass --overwrite")
def destination_exists() -> tuple[str, ...]:
    words = convert("deepspeed")
    run(*words)
    return words


@produces("is not empty, and was not written by ucp")
def destination_of_others() -> tuple[str, ...]:
    Path("out").mkdir()
    Path("out/file").touch()
    return convert("deepspeed")


@produces("is the source ... or lies inside it")
def destination_in_source() -> tuple[str, ...]:
    copy("fsdp")
    return ("convert", "fsdp", "fsdp/out")


@produces("an unfinished conversion lies at")
def unfinished() -> tuple[str, ...]:
    reads_an_unfinished_conversion()
    return ("convert", "deepspeed", "out")


@produces("--resume continues only a conversion of the same source with the same options")
def other_options() -> tuple[str, ...]:
    return (*destination_exists(), "--resume", "--include", "*/weight")


@produces("do not fit; nothing was loaded")
def other_model() -> tuple[str, ...]:
    copy("model")
    load_into(torch.nn.Linear(4, 4), checkpoint="model")
    return ()


@produces("the checkpoint holds weights only, and no optimizer states")
def published_model() -> tuple[str, ...]:
    model = torch.nn.Linear(4, 4)
    torch.save(model.state_dict(), "weights.pt")
    load_into(model, checkpoint="weights.pt", optimizer=torch.optim.AdamW(model.parameters()))
    return ()


@produces("pass rename=")
def prefix() -> tuple[str, ...]:
    model = torch.nn.Linear(4, 4)
    torch.save({f"model.{name}": tensor for name, tensor in model.state_dict().items()}, "weights.pt")
    load_into(model, checkpoint="weights.pt")
    return ()


def trained(*params: torch.nn.Parameter) -> torch.optim.Optimizer:
    """An optimizer of these parameters that has done a step."""
    optimizer = torch.optim.AdamW(params)
    sum(param.sum() for param in params).backward()
    optimizer.step()
    return optimizer


@produces("the saved optimizer only numbers its parameters, and two orders fit")
def two_orders() -> tuple[str, ...]:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(2)))
    optimizer = trained(*reversed(list(model.parameters())))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "run.pt")
    load_into(model, checkpoint="run.pt", optimizer=optimizer)
    return ()


@produces("is the state of another scheduler")
def other_scheduler() -> tuple[str, ...]:
    model = torch.nn.Linear(4, 4)
    optimizer = trained(*model.parameters())
    schedulers = torch.optim.lr_scheduler.StepLR(optimizer, 2), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    save(model, optimizer, None, "run", scheduler=schedulers[0])
    load_into(model, checkpoint="run", optimizer=optimizer, scheduler=schedulers[1])
    return ()


@produces("expected at most ... bytes in a save (bandwidth x seconds)")
def slow_storage() -> tuple[str, ...]:
    model = torch.nn.Linear(4, 4)
    save(model, trained(*model.parameters()), None, "run", step=1)
    SparseWindow.fit("run", bandwidth=100, seconds=1)
    return ()


@pytest.mark.parametrize("message", CASES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_command_prints_the_message(message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        result = CliRunner().invoke(cli, CASES[message]())
        output = result.output
        assert isinstance(result.exception, SystemExit), output
        assert result.exit_code in (1, 2), output
    except UcpError as error:
        output = str(error)
    pattern = ".*?".join(re.escape(part.strip()) for part in message.split("..."))
    assert re.search(pattern, output, re.DOTALL), output


def test_the_page_has_the_messages() -> None:
    assert ROW.findall(PAGE.read_text()) == list(CASES)
