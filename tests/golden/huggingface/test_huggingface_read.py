"""Models that transformers, torch and torch.distributed.checkpoint saved, read as atoms.

Every tensor is compared with the truth of the live model (fixtures/make/huggingface/make_hf_models.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ucp
from tests.golden.damage import Gadget, check_refused, copy_to, cut, flip
from ucp.contract.model import sort_in_model_order
from ucp.core.gaps import check_cover
from ucp.core.index import Index, Kind
from ucp.errors import (
    CorruptError,
    MalformedError,
    MissingFileError,
    ReplicaError,
    UcpError,
    UnknownFormatError,
    UnsupportedError,
    UsageError,
)

ROOT = Path(__file__).parents[3] / "fixtures" / "huggingface"
TRUTH: dict[str, Any] = {path.parent.name: json.loads(path.read_text()) for path in ROOT.glob("*/truth.json")}
CASES = sorted(TRUTH)
NAMES = json.loads((ROOT / "names-5.23.0.json").read_text())["models"]


@cache
def index_of(case: str) -> Index:
    return ucp.inspect(ROOT / case / "model")


def digest(tensor: torch.Tensor) -> list[object]:
    raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), hashlib.sha256(raw).hexdigest()]


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_the_truth_bit_for_bit(case: str) -> None:
    check_cover(index_of(case))
    checkpoint, wanted = ucp.open(ROOT / case / "model"), dict(TRUTH[case]["tensors"])
    for second, first in checkpoint.index.aliases.items():
        assert wanted.pop(second) == wanted[first]
    assert {name: digest(checkpoint.read(name, "weight")) for name in checkpoint.index.atoms} == wanted
    assert all(list(atom.states) == ["weight"] for atom in checkpoint.index.atoms.values())


@pytest.mark.parametrize("case", CASES)
def test_atoms_come_in_the_order_of_the_model_or_it_says_that_they_do_not(case: str) -> None:
    index, params = index_of(case), TRUTH[case]["parameters"]
    assert index.unordered == (not params)
    assert list(index.atoms) == (params or sorted(index.atoms))
    assert any("order" in note for note in index.notes) == index.unordered


@pytest.mark.parametrize("name", sorted(NAMES))
def test_the_order_is_that_of_transformers_or_not_known(name: str) -> None:
    """Names of a release in no order: those of one with experts, or of a class that is not listed, have none."""
    names, config = list(NAMES[name]["tensors"]), NAMES[name]["config"]
    random.Random(1).shuffle(names)
    found = sort_in_model_order(names, config.get("model_type"))
    assert found is None or sorted(found) == sorted(names)
    if any(".experts." in own for own in names):
        assert found is None


@pytest.mark.parametrize("case", CASES)
def test_the_configuration_is_an_extra_and_the_rest_is_carried_along(case: str) -> None:
    index = index_of(case)
    extras = {extra.name: extra.value for extra in index.extras}
    assert extras["config"] == json.loads((ROOT / case / "model" / "config.json").read_text())
    beside = {file.name for file in (ROOT / case / "model").iterdir() if file.name == "generation_config.json"}
    assert extras.keys() - {"config"} == {f"companion/{name}" for name in beside}
    assert (index.step, index.groups) == (None, ())
    assert any("weights only" in note for note in index.notes)


@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral"])
def test_megatron_is_told_what_the_configuration_says(case: str, tmp_path: Path) -> None:
    ucp.convert(ROOT / case / "model", tmp_path / "out", to="megatron", topology="tp=2")
    (args,) = (extra.value for extra in ucp.inspect(tmp_path / "out").extras if extra.name == "args")
    found = getattr(args, "state", args)
    assert found["num_attention_heads"] == 4
    assert found["norm_epsilon"] == (1e-6 if case == "llama" else 1e-5)
    assert case == "gpt2" or (found["num_query_groups"], found["rotary_base"] > 1) == (2, True)


def test_parts_of_ranks_are_those_of_the_one_file() -> None:
    index = index_of("llama-dcp")
    assert index.topology.dp == 2
    assert len(index.atoms["model.layers.0.mlp.up_proj.weight"].states["weight"].fragments) == 2
    assert ucp.diff(ROOT / "llama-dcp" / "model", ROOT / "llama" / "model").equal


class TestWhatIsGiven:
    """A folder, a file, an index, or a folder of the hub's cache."""

    def test_any_safetensors_file_with_any_type(self, tmp_path: Path) -> None:
        types = ["float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int8", "uint8", "bool"]
        tensors = {f"t.{name}": torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in types}
        tensors |= {"scalar": torch.tensor(3.5), "count": torch.tensor(7), "none": torch.zeros(0, 4)}
        save_file(tensors, tmp_path / "some.safetensors")
        checkpoint = ucp.open(tmp_path / "some.safetensors")
        assert {name: digest(checkpoint.read(name, "weight")) for name in tensors} == {
            name: digest(own) for name, own in tensors.items()
        }
        kinds = {name: atom.kind for name, atom in checkpoint.index.atoms.items()}
        assert kinds["count"] is kinds["t.bool"] is kinds["t.uint8"] is Kind.BUFFER
        assert kinds["scalar"] is kinds["t.float8_e5m2"] is Kind.PARAMETER

    def test_the_cache_of_the_hub(self, tmp_path: Path) -> None:
        repo = tmp_path / "models--org--name"
        shutil.copytree(ROOT / "llama" / "model", repo / "snapshots" / "abc123")
        shutil.copytree(ROOT / "gpt2" / "model", repo / "snapshots" / "def456")
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text("abc123")
        assert ucp.diff(repo, ROOT / "llama" / "model").equal

    def test_numbered_files_without_an_index_when_all_are_there(self, tmp_path: Path) -> None:
        shutil.copytree(ROOT / "llama-sharded" / "model", tmp_path / "copy")
        (tmp_path / "copy" / "model.safetensors.index.json").unlink()
        assert ucp.diff(tmp_path / "copy", ROOT / "llama-sharded" / "model").equal
        assert any("no index file" in note for note in ucp.inspect(tmp_path / "copy").notes)

    def test_the_same_model_in_torch_files_is_left_alone(self, tmp_path: Path) -> None:
        shutil.copytree(ROOT / "llama" / "model", tmp_path / "copy")
        shutil.copy(ROOT / "llama-bin" / "model" / "pytorch_model.bin", tmp_path / "copy")
        index = ucp.inspect(tmp_path / "copy")
        assert index.evidence == ("model.safetensors",)
        assert any("pytorch_model.bin" in note for note in index.notes)
        assert not any("pytorch_model.bin" in extra.name for extra in index.extras)

    def test_a_folder_of_the_trainer(self, tmp_path: Path) -> None:
        folder = tmp_path / "checkpoint-7"
        shutil.copytree(ROOT / "llama" / "model", folder)
        (folder / "trainer_state.json").write_text('{"global_step": 7}')
        index = ucp.inspect(folder)
        assert (index.format, index.step) == ("huggingface", 7)
        assert "companion/trainer_state.json" in {extra.name for extra in index.extras}
        torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
        assert ucp.inspect(folder).format == "torch"  # which reads the optimizer too

    def test_one_file(self) -> None:
        index = ucp.inspect(ROOT / "llama" / "model" / "model.safetensors")
        assert list(index.atoms) == list(index_of("llama").atoms)
        assert [extra.name for extra in index.extras] == ["config"]

    def test_an_index(self) -> None:
        index = ucp.inspect(ROOT / "llama-sharded" / "model" / "model.safetensors.index.json")
        assert index.atoms == index_of("llama-sharded").atoms

    def test_a_variant(self, tmp_path: Path) -> None:
        shutil.copy(ROOT / "llama" / "model" / "model.safetensors", tmp_path / "model.fp16.safetensors")
        assert len(ucp.inspect(tmp_path).atoms) == 21


class TestBesideOthers:
    """Folders of training frameworks hold the model in this format too, and stay what they are."""

    def test_deepspeed(self, tmp_path: Path) -> None:
        shutil.copytree(ROOT.parent / "deepspeed" / "z2-dp2-hf-trainer" / "checkpoint-3", tmp_path / "copy")
        shutil.copytree(ROOT / "llama" / "model", tmp_path / "copy", dirs_exist_ok=True)
        assert ucp.inspect(tmp_path / "copy").format == "deepspeed"

    def test_dcp_and_atoms(self, tmp_path: Path) -> None:
        shutil.copytree(ROOT.parent / "torch" / "fsdp2-dp4" / "checkpoint", tmp_path / "copy")
        shutil.copytree(ROOT / "llama" / "model", tmp_path / "copy", dirs_exist_ok=True)
        assert ucp.inspect(tmp_path / "copy").format == "dcp"
        ucp.convert(ROOT / "llama" / "model", tmp_path / "atoms")
        shutil.copytree(ROOT / "llama" / "model", tmp_path / "atoms", dirs_exist_ok=True)
        assert ucp.inspect(tmp_path / "atoms").format == "ucp"

    def test_an_adapter_is_none(self, tmp_path: Path) -> None:
        folder = tmp_path / "lora" / "adapter"  # above which no other test leaves a checkpoint, to be meant instead
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
        save_file({"a": torch.zeros(2)}, folder / "adapter_model.safetensors")
        for path in (folder, folder / "adapter_model.safetensors"):
            with pytest.raises(UnknownFormatError, match="LoRA adapter"):
                ucp.inspect(path)

    @pytest.mark.parametrize(
        ("names", "is_open"),
        [
            (["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"], True),
            (["model.embed_tokens.weight", "model.norm.weight"], True),  # a tied head is stored once
            (["gpt_neox.embed_in.weight", "embed_out.weight"], True),
            (["model.embed_tokens.weight", "model.norm.weight", "score.weight"], False),
            (["embed_tokens.weight", "norm.weight"], False),
            (["blocks.0.weight"], False),
        ],
    )
    def test_only_a_head_that_may_be_there_may_be_tied(self, names: list[str], is_open: bool, tmp_path: Path) -> None:
        save_file({name: torch.zeros(2, 2) for name in names}, tmp_path / "model.safetensors")
        notes = ucp.inspect(tmp_path).notes
        assert any("is tied to" in note for note in notes) is is_open

    @pytest.mark.parametrize("is_linked", [False, True])
    def test_an_adapter_beside_the_model_is_reported_as_not_merged(self, is_linked: bool, tmp_path: Path) -> None:
        folder = tmp_path / "model"
        shutil.copytree(ROOT / "llama" / "model", folder)
        (folder / "adapter_config.json").write_text("{}")
        save_file({"a": torch.zeros(2)}, tmp_path / "adapter.safetensors")
        place = os.symlink if is_linked else shutil.copyfile  # the hub's cache has links
        place(tmp_path / "adapter.safetensors", folder / "adapter_model.safetensors")
        verdict = "not read or merged: the result is the base model alone"
        index = ucp.inspect(folder)
        assert any(verdict in note for note in index.notes)
        reports = [ucp.convert(folder, tmp_path / to, to=to) for to in ("ucp", "dcp", "huggingface")]
        reports.append(ucp.convert(tmp_path / "ucp", tmp_path / "again", to="huggingface"))
        for dropped in [index.dropped, *(report.dropped for report in reports)]:
            (line,) = [line for line in dropped if verdict in line]
            assert "adapter_model.safetensors" in line
            assert not any("adapter" in line and "of the training" in line for line in dropped)


FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
INDEX = "model.safetensors.index.json"


def edit_index(copy: Path, **changed: object) -> None:
    document = json.loads((copy / INDEX).read_text())
    document["weight_map"] |= changed
    document["weight_map"] = {name: file for name, file in document["weight_map"].items() if file is not None}
    (copy / INDEX).write_text(json.dumps(document))


def store_twice(copy: Path) -> None:
    for file in (copy / FIRST, copy / SECOND):
        save_file(load_file(file) | {"lm_head.weight": torch.zeros(2)}, file)


def make_variants(copy: Path) -> None:
    for variant in ("fp16", "bf16"):
        shutil.copy(copy / INDEX, copy / f"model.safetensors.index.{variant}.json")
    (copy / INDEX).unlink()


def quantise(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))


NORM = "model.norm.weight"
DAMAGE: dict[str, tuple[Callable[[Path], object], type[UcpError], str]] = {
    "a missing file": (lambda copy: (copy / SECOND).unlink(), MissingFileError, rf"missing: {SECOND}, .* \d+ tensors"),
    "a name no file can have": (
        lambda copy: edit_index(copy, **{NORM: f"{'m' * 5000}.safetensors"}),
        MissingFileError,
        r"missing: m{80}\.\.\., which",
    ),
    "a missing file, no index": (
        lambda copy: ((copy / FIRST).unlink(), (copy / INDEX).unlink()),
        MissingFileError,
        f"missing: {FIRST}",
    ),
    "a tensor that the file lacks": (
        lambda copy: edit_index(copy, ghost=FIRST),
        MalformedError,
        f"{FIRST}: lacks ghost",
    ),
    "a tensor not in the index": (
        lambda copy: edit_index(copy, **{NORM: None}),
        MalformedError,
        rf"holds {NORM}, which {INDEX}",
    ),
    "a tensor in two files": (store_twice, MalformedError, r"holds lm_head\.weight, as .* does"),
    "a truncated file": (lambda copy: cut(copy / FIRST, 100), MalformedError, r"expected \d+ bytes; got \d+"),
    "two forms of a model": (
        lambda copy: shutil.copy(ROOT / "llama" / "model" / "model.safetensors", copy),
        UsageError,
        r"a model in 2 forms(.|\n)*index\.json(.|\n)*model\.safetensors",
    ),
    "two indexes": (make_variants, UsageError, "a model in 2 forms"),
    "a quantised model": (quantise, UnsupportedError, r"config\.json: gptq"),
    **{
        f"an index that leads to {file!r}": (
            lambda copy, file=file: edit_index(copy, **{NORM: file}),
            MalformedError,
            f"weight_map.*{file!r}",
        )
        for file in ("../elsewhere.safetensors", "/etc/passwd", "", 3)
    },
    **{
        f"{text!r} as {name}": (
            lambda copy, text=text, name=name: (copy / name).write_text(text),
            MalformedError,
            rf"in .*{name}|{INDEX}",
        )
        for text, name in (
            *((text, INDEX) for text in ("", "{", "[]", "{}", '{"weight_map": []}')),
            *((text, "config.json") for text in ("", '{"a": ', "[1]")),
        )
    },
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_refused(name: str, tmp_path: Path) -> None:
    copy = copy_to(tmp_path, ROOT / "llama-sharded" / "model")
    damage, error, said = DAMAGE[name]
    damage(copy)
    check_refused(copy, error, said)


def test_the_file_of_transformers_is_preferred(tmp_path: Path) -> None:
    for number, name in enumerate(["consolidated", "model", "other"]):
        save_file({"a": torch.full((2,), float(number))}, tmp_path / f"{name}.safetensors")
    assert ucp.open(tmp_path).read("a").tolist() == [1, 1]


def test_one_of_several_files_is_no_model() -> None:
    with pytest.raises(UsageError, match=f"{FIRST} .*folder"):
        ucp.inspect(ROOT / "llama-sharded" / "model" / FIRST)


def header(**tensors: list[Any]) -> bytes:
    keys = ("dtype", "shape", "data_offsets")
    text = json.dumps({name: dict(zip(keys, own, strict=True)) for name, own in tensors.items()}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(16)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (header(a=["F32", [2], [0, 8]], b=["F32", [2], [4, 12]]), "'b' at byte"),
        (header(a=["F32", [2], [8, 16]]), "'a' at byte"),
        (header(a=["F32", [3], [0, 8]]), "got 8 bytes"),
        (header(a=["F32", [2], [0, 800]]), "got 800 bytes"),
        (header(a=["F32", [200], [0, 800]]), "8.. bytes; got"),
        (header(a=["F32", [-2], [0, 8]]), "dtype, shape and data_offsets"),
        ((1 << 60).to_bytes(8, "little") + b"{}" + bytes(20), "30 bytes; got one"),
        (b"\x06" + bytes(7) + b'{"a":1', "JSON"),
        (b"\x0d" + bytes(7) + b'{"a":1,"a":2}', "'a' twice"),
        (b"", "10 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n", "43 bytes; got one"),
    ],
)
def test_a_header_that_is_none_or_lies_is_refused(tmp_path: Path, data: bytes, found: str) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "model.safetensors").write_bytes(data)
    check_refused(tmp_path / "copy", MalformedError, found)


def test_a_type_of_elements_that_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "model.safetensors").write_bytes(header(a=["F99", [2], [0, 8]]))
    check_refused(tmp_path / "copy", UnsupportedError, "'a' is of type 'F99'")


def test_a_tied_matrix_with_other_elements(tmp_path: Path) -> None:
    copy = copy_to(tmp_path, ROOT / "llama-tied" / "model")
    file = copy / "model.safetensors"
    tensors = load_file(file)
    tied = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tied, file)
    assert ucp.diff(copy, ROOT / "llama-tied" / "model").equal
    tied["lm_head.weight"][3, 3] += 1
    save_file(tied, file)
    check_refused(copy, ReplicaError, r"model\.embed_tokens\.weight")
    save_file({**tied, "lm_head.weight": torch.zeros(3, 16)}, file)
    check_refused(copy, MalformedError, r"lm_head\.weight .*\[3, 16\]")


def test_damage_in_torch_files_is_refused(tmp_path: Path) -> None:
    copy = copy_to(tmp_path, ROOT / "llama-bin" / "model")
    flip(ucp.inspect(copy).atoms["lm_head.weight"].states["weight"].fragments[0].ref)
    check_refused(copy, CorruptError, "CRC-32")
    for content in ({"w": torch.zeros(2), "x": Gadget()}, Gadget()):
        torch.save(content, copy / "pytorch_model.bin")
        check_refused(copy, MalformedError, "state dict")
    (copy / "pytorch_model.bin").write_bytes(pickle.dumps(Gadget()))
    check_refused(copy, MalformedError, "magic number")


RANK = "shard-0000{}-model-00001-of-00001.safetensors"


def rewrite_offsets(copy: Path, make: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = copy / RANK.format(2)
    tensors, said = load_file(file), make(load_file(file))
    text = said if isinstance(said, str) else json.dumps(said)
    save_file(tensors, file, metadata={"DCP_SHARDING_INFO": text})


NO_OFFSETS = "shard-00002-.*: expected DCP_SHARDING_INFO"
HELD_TWICE = "shard-00002-.*: holds shards of .* that shard-00001-.* holds too"
RANK_DAMAGE: dict[str, tuple[Callable[[Path], object], type[UcpError], str]] = {
    "a missing rank": (lambda copy: (copy / RANK.format(1)).unlink(), MissingFileError, "missing: shard-00001-model"),
    "a lost last rank": (
        lambda copy: (copy / RANK.format(2)).unlink(),
        MalformedError,
        r"config\.json(.|\n)*hidden_size = 16",
    ),
    "one rank over the other": (
        lambda copy: shutil.copyfile(copy / RANK.format(1), copy / RANK.format(2)),
        MalformedError,
        HELD_TWICE,
    ),
    "the other over the one": (
        lambda copy: shutil.copyfile(copy / RANK.format(2), copy / RANK.format(1)),
        MalformedError,
        HELD_TWICE,
    ),
    "one rank twice, no config": (
        lambda copy: (
            shutil.copyfile(copy / RANK.format(1), copy / RANK.format(2)),
            (copy / "config.json").unlink(),
        ),
        MalformedError,
        HELD_TWICE,
    ),
    "null as offsets": (lambda copy: rewrite_offsets(copy, lambda _: None), MalformedError, NO_OFFSETS),
    "no offsets": (lambda copy: rewrite_offsets(copy, lambda _: {}), MalformedError, NO_OFFSETS),
    "no JSON": (lambda copy: rewrite_offsets(copy, lambda _: "{"), MalformedError, NO_OFFSETS),
    "negative offsets": (
        lambda copy: rewrite_offsets(copy, lambda own: {name: {"saved_offsets": [-1]} for name in own}),
        MalformedError,
        NO_OFFSETS,
    ),
    "offsets of another rank": (
        lambda copy: rewrite_offsets(
            copy, lambda own: {name: {"saved_offsets": [0] * tensor.dim()} for name, tensor in own.items()}
        ),
        MalformedError,
        HELD_TWICE,
    ),
}
"""Files of HuggingFaceStorageWriter, one of each rank."""


@pytest.mark.parametrize("name", RANK_DAMAGE)
def test_damage_in_files_of_ranks_is_refused(name: str, tmp_path: Path) -> None:
    copy = copy_to(tmp_path, ROOT / "llama-dcp" / "model")
    damage, error, said = RANK_DAMAGE[name]
    damage(copy)
    check_refused(copy, error, said)


def test_that_lost_last_ranks_cannot_be_known_is_noted(tmp_path: Path) -> None:
    copy = copy_to(tmp_path, ROOT / "llama-dcp" / "model")
    assert not any("last ranks" in note for note in index_of("llama-dcp").notes)
    (copy / "config.json").unlink()
    assert any("last ranks" in note for note in ucp.inspect(copy).notes)


@pytest.mark.parametrize("case", CASES)
def test_atoms_made_of_it_are_equal(case: str, tmp_path: Path) -> None:
    ucp.convert(ROOT / case / "model", tmp_path / "atoms", verify=True)
    assert ucp.diff(ROOT / case / "model", tmp_path / "atoms").equal
    made = ucp.inspect(tmp_path / "atoms")
    assert (list(made.atoms), made.unordered) == (list(index_of(case).atoms), index_of(case).unordered)
