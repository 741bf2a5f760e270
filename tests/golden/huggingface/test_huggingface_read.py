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
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ucp
from ucp.contract.model import sort_in_model_order
from ucp.core.gaps import check_cover
from ucp.core.index import Index, Kind

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
def test_tied_names_are_those_of_the_model(case: str) -> None:
    assert index_of(case).aliases == TRUTH[case]["tied"]


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


@pytest.mark.parametrize("case", CASES)
def test_atoms_made_of_it_are_equal(case: str, tmp_path: Path) -> None:
    ucp.convert(ROOT / case / "model", tmp_path / "atoms", verify=True)
    assert ucp.diff(ROOT / case / "model", tmp_path / "atoms").equal
    made = ucp.inspect(tmp_path / "atoms")
    assert (list(made.atoms), made.unordered) == (list(index_of(case).atoms), index_of(case).unordered)


@pytest.mark.parametrize("case", ["llama-sharded", "llama-dcp", "llama-bin"])
def test_a_conversion_to_dcp_is_equal(case: str, tmp_path: Path) -> None:
    ucp.convert(ROOT / case / "model", tmp_path / "dcp", to="dcp", topology="dp=2")
    assert ucp.diff(ROOT / case / "model", tmp_path / "dcp").equal


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

    def test_one_file(self) -> None:
        index = ucp.inspect(ROOT / "llama" / "model" / "model.safetensors")
        assert list(index.atoms) == list(index_of("llama").atoms)
        assert [extra.name for extra in index.extras] == ["config"]

    def test_an_index(self) -> None:
        index = ucp.inspect(ROOT / "llama-sharded" / "model" / "model.safetensors.index.json")
        assert index.atoms == index_of("llama-sharded").atoms

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

    def test_a_variant(self, tmp_path: Path) -> None:
        shutil.copy(ROOT / "llama" / "model" / "model.safetensors", tmp_path / "model.fp16.safetensors")
        assert len(ucp.inspect(tmp_path).atoms) == 21

    def test_numbered_files_without_an_index_when_all_are_there(self, tmp_path: Path) -> None:
        shutil.copytree(ROOT / "llama-sharded" / "model", tmp_path / "copy")
        (tmp_path / "copy" / "model.safetensors.index.json").unlink()
        assert ucp.diff(tmp_path / "copy", ROOT / "llama-sharded" / "model").equal
        assert any("without an index" in note for note in ucp.inspect(tmp_path / "copy").notes)

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
            with pytest.raises(ucp.UcpError, match="LoRA adapter"):
                ucp.inspect(path)

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


class TestDamage:
    """Every damage is one clear error."""

    @pytest.fixture
    def copy(self, tmp_path: Path) -> Path:
        shutil.copytree(ROOT / "llama-sharded" / "model", tmp_path / "copy")
        return tmp_path / "copy"

    def refused(self, copy: Path, match: str) -> None:
        with pytest.raises(ucp.UcpError, match=match):
            ucp.convert(copy, copy.parent / "atoms")
        assert not (copy.parent / "atoms").exists()

    def index_json(self, copy: Path, **changed: object) -> None:
        file = copy / "model.safetensors.index.json"
        document = json.loads(file.read_text())
        document["weight_map"] |= changed
        document["weight_map"] = {name: own for name, own in document["weight_map"].items() if own is not None}
        file.write_text(json.dumps(document))

    def test_a_missing_file(self, copy: Path) -> None:
        (copy / "model-00002-of-00002.safetensors").unlink()
        self.refused(copy, r"missing: model-00002-of-00002\.safetensors, which .* names for \d+ tensors")

    def test_a_name_that_no_file_can_have(self, copy: Path) -> None:
        self.index_json(copy, **{"model.norm.weight": f"{'m' * 5000}.safetensors"})
        self.refused(copy, r"missing: m{80}\.\.\., which model\.safetensors\.index\.json names for 1 tensor")

    def test_a_missing_file_without_an_index(self, copy: Path) -> None:
        (copy / "model-00001-of-00002.safetensors").unlink()
        (copy / "model.safetensors.index.json").unlink()
        self.refused(copy, r"missing: model-00001-of-00002\.safetensors")

    def test_a_tensor_that_the_file_lacks(self, copy: Path) -> None:
        self.index_json(copy, ghost="model-00001-of-00002.safetensors")
        self.refused(copy, r"model-00001-of-00002\.safetensors: lacks ghost")

    def test_a_tensor_that_the_index_does_not_name(self, copy: Path) -> None:
        self.index_json(copy, **{"model.norm.weight": None})
        self.refused(copy, r"holds model\.norm\.weight, which model\.safetensors\.index\.json does not name")

    def test_a_tensor_in_two_files(self, copy: Path) -> None:
        first, second = sorted(copy.glob("*.safetensors"))
        save_file(load_file(second) | {"lm_head.weight": torch.zeros(2)}, second)
        save_file(load_file(first) | {"lm_head.weight": torch.zeros(2)}, first)
        self.refused(copy, r"holds lm_head\.weight, as .* does")

    @pytest.mark.parametrize("file", ["../elsewhere.safetensors", "/etc/passwd", "", 3])
    def test_an_index_that_leads_elsewhere(self, copy: Path, file: object) -> None:
        self.index_json(copy, **{"model.norm.weight": file})
        self.refused(copy, "expected names of files beside")

    @pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}'])
    def test_a_broken_index(self, copy: Path, text: str) -> None:
        (copy / "model.safetensors.index.json").write_text(text)
        self.refused(copy, r"model\.safetensors\.index\.json")

    @pytest.mark.parametrize("text", ["", '{"a": ', "[1]"])
    def test_a_broken_configuration(self, copy: Path, text: str) -> None:
        (copy / "config.json").write_text(text)
        self.refused(copy, r"expected (a )?JSON.* in .*config\.json")

    def test_a_truncated_file(self, copy: Path) -> None:
        file = copy / "model-00001-of-00002.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        self.refused(copy, r"not a whole safetensors file: expected \d+ bytes; got \d+")

    @pytest.mark.parametrize(
        ("header", "found"),
        [
            ({"a": ["F32", [2], [0, 8]], "b": ["F32", [2], [4, 12]]}, "a hole or an overlap"),
            ({"a": ["F32", [2], [8, 16]]}, "a hole or an overlap"),
            ({"a": ["F32", [3], [0, 8]]}, "got 8 bytes"),
            ({"a": ["F32", [2], [0, 800]]}, "got 800 bytes"),
            ({"a": ["F32", [200], [0, 800]]}, "expected 8.. bytes; got"),
            ({"a": ["F99", [2], [0, 8]]}, "type 'F99'"),
            ({"a": ["F32", [-2], [0, 8]]}, "expected dtype, shape and data_offsets"),
        ],
    )
    def test_a_header_that_lies(self, tmp_path: Path, header: dict[str, list[Any]], found: str) -> None:
        keys = ("dtype", "shape", "data_offsets")
        text = json.dumps({name: dict(zip(keys, own, strict=True)) for name, own in header.items()}).encode()
        (tmp_path / "copy").mkdir()
        (tmp_path / "copy" / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
        self.refused(tmp_path / "copy", found)

    @pytest.mark.parametrize(
        ("data", "found"),
        [
            ((1 << 60).to_bytes(8, "little") + b"{}" + bytes(20), "expected a header within its"),
            (b"\x06" + bytes(7) + b'{"a":1', "expected a header of JSON"),
            (b"\x0d" + bytes(7) + b'{"a":1,"a":2}', "'a' twice"),
            (b"", "expected at least 10 bytes"),
            (b"version https://git-lfs.github.com/spec/v1\n", "not a whole safetensors file"),
        ],
    )
    def test_what_is_no_header(self, tmp_path: Path, data: bytes, found: str) -> None:
        (tmp_path / "copy").mkdir()
        (tmp_path / "copy" / "model.safetensors").write_bytes(data)
        self.refused(tmp_path / "copy", found)

    def test_two_forms_of_a_model(self, copy: Path) -> None:
        shutil.copy(ROOT / "llama" / "model" / "model.safetensors", copy)
        self.refused(copy, r"holds a model in 2 forms.*pass the file(.|\n)*index\.json(.|\n)*model\.safetensors")

    def test_two_indexes(self, copy: Path) -> None:
        for name in ("model.fp16", "model.bf16"):
            stem, variant = name.split(".")
            shutil.copy(copy / "model.safetensors.index.json", copy / f"{stem}.safetensors.index.{variant}.json")
        (copy / "model.safetensors.index.json").unlink()
        self.refused(copy, "holds a model in 2 forms")

    def test_one_of_several_files(self, copy: Path) -> None:
        self.refused(copy / "model-00001-of-00002.safetensors", "one of several files of a model; pass its folder")

    def test_a_quantised_model(self, copy: Path) -> None:
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
        self.refused(copy, r"quantised \(config\.json: gptq\)")

    def test_a_tied_matrix_with_other_elements(self, tmp_path: Path) -> None:
        shutil.copytree(ROOT / "llama-tied" / "model", tmp_path / "copy")
        file = tmp_path / "copy" / "model.safetensors"
        tensors = load_file(file)
        tied = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        save_file(tied, file)
        assert ucp.diff(tmp_path / "copy", ROOT / "llama-tied" / "model").equal
        tied["lm_head.weight"][3, 3] += 1
        save_file(tied, file)
        self.refused(tmp_path / "copy", r"model\.embed_tokens\.weight")
        save_file({**tied, "lm_head.weight": torch.zeros(3, 16)}, file)
        self.refused(tmp_path / "copy", "which have the shapes")

    def test_a_gadget(self, tmp_path: Path) -> None:
        class Gadget:
            def __reduce__(self) -> tuple[Any, ...]:
                return print, ("executed",)

        shutil.copytree(ROOT / "llama-bin" / "model", tmp_path / "copy")
        for content in ({"w": torch.zeros(2), "x": Gadget()}, Gadget()):
            torch.save(content, tmp_path / "copy" / "pytorch_model.bin")
            self.refused(tmp_path / "copy", "expected the state dict of a model")
        (tmp_path / "copy" / "pytorch_model.bin").write_bytes(pickle.dumps(Gadget()))
        self.refused(tmp_path / "copy", "expected the magic number of torch.save")

    def test_a_flipped_byte_in_a_torch_file(self, tmp_path: Path) -> None:
        shutil.copytree(ROOT / "llama-bin" / "model", tmp_path / "copy")
        ref = index_of("llama-bin").atoms["lm_head.weight"].states["weight"].fragments[0].ref
        file = tmp_path / "copy" / "pytorch_model.bin"
        data = bytearray(file.read_bytes())
        data[ref.offset] ^= 1  # type: ignore[union-attr]
        file.write_bytes(data)
        self.refused(tmp_path / "copy", "CRC-32 differs")


class TestRanks:
    """Files of HuggingFaceStorageWriter, one or more of each rank."""

    @pytest.fixture
    def copy(self, tmp_path: Path) -> Path:
        shutil.copytree(ROOT / "llama-dcp" / "model", tmp_path / "copy")
        return tmp_path / "copy"

    def refused(self, copy: Path, match: str) -> None:
        with pytest.raises(ucp.UcpError, match=match):
            ucp.convert(copy, copy.parent / "atoms")

    def rewrite(self, file: Path, offsets: object) -> None:
        save_file(load_file(file), file, metadata={"DCP_SHARDING_INFO": json.dumps(offsets)})

    def test_a_missing_rank(self, copy: Path) -> None:
        (copy / "shard-00001-model-00001-of-00001.safetensors").unlink()
        self.refused(copy, "missing: shard-00001-model")

    @pytest.mark.parametrize(("number", "other"), [(1, 2), (2, 1)])
    @pytest.mark.parametrize("has_config", [True, False])
    def test_a_copy_of_another_rank(self, copy: Path, number: int, other: int, has_config: bool) -> None:
        name = "shard-0000{}-model-00001-of-00001.safetensors"
        shutil.copyfile(copy / name.format(other), copy / name.format(number))
        if not has_config:
            (copy / "config.json").unlink()
        self.refused(copy, "shard-00002-.*: holds shards of .* tensors that shard-00001-.* holds too")

    def test_a_lost_last_rank(self, copy: Path) -> None:
        (copy / "shard-00002-model-00001-of-00001.safetensors").unlink()
        self.refused(copy, r"config\.json describes; got\n(.*\n)*.*hidden_size = 16")

    def test_what_cannot_be_known_is_said(self, copy: Path) -> None:
        assert not any("last ranks" in note for note in index_of("llama-dcp").notes)
        (copy / "config.json").unlink()
        assert any("last ranks" in note for note in ucp.inspect(copy).notes)

    def test_no_offsets(self, copy: Path) -> None:
        file = copy / "shard-00002-model-00001-of-00001.safetensors"
        for said in (None, {}, {name: {"saved_offsets": [-1]} for name in load_file(file)}):
            self.rewrite(file, said)
            self.refused(copy, "shard-00002-.*: expected DCP_SHARDING_INFO of every tensor")

    def test_offsets_that_overlap(self, copy: Path) -> None:
        file = copy / "shard-00002-model-00001-of-00001.safetensors"
        tensors = load_file(file)
        self.rewrite(file, {name: {"saved_offsets": [0] * own.dim()} for name, own in tensors.items()})
        self.refused(copy, "shard-00002-.*: holds shards of .* that shard-00001-.* holds too")

    def test_metadata_that_is_no_json(self, copy: Path) -> None:
        file = copy / "shard-00002-model-00001-of-00001.safetensors"
        save_file(load_file(file), file, metadata={"DCP_SHARDING_INFO": "{"})
        self.refused(copy, "expected DCP_SHARDING_INFO")
