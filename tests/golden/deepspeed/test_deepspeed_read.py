"""Every kept DeepSpeed checkpoint, read and compared bit for bit with what was gathered inside the training run."""

import json
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from ucp_formats.deepspeed.partition import undo_round_robin
from ucp_formats.deepspeed.read.source import DeepSpeedFormat
from ucp_formats.deepspeed.read.universal.source import DeepSpeedUniversalFormat

from ucp.core.gaps import check_cover
from ucp.core.index import Index, Kind, StateIndex
from ucp.core.slices import Locator, Piece, resolve, resolve_replicas
from ucp.core.target import full_slice
from ucp.core.tensor import DType, InlineTensor, TensorRef
from ucp.errors import MalformedError, UnsupportedError
from ucp.io.safetensors import read_header
from ucp.io.torch_file.archive import read_archive

ROOT = Path(__file__).parents[3] / "fixtures" / "deepspeed"
REFUSED = {
    "z1-dp2-elastic/checkpoint": "elastic_checkpoint",
}
ELASTIC = "z1-dp2-elastic"
NATIVE = sorted(case.name for case in ROOT.iterdir() if (case / "truth.json").exists() and case.name != ELASTIC)
CASES = [*NATIVE, *(f"{case}/universal" for case in NATIVE if (ROOT / case / "universal").is_dir())]
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Truth:
    report: dict
    tensors: dict[str, TensorRef]


@cache
def truth_of(case: str) -> Truth:
    case = case.partition("/")[0]
    header = read_header(str(ROOT / case / "truth.safetensors"))
    return Truth(json.loads((ROOT / case / "truth.json").read_text()), dict(header.tensors))


@cache
def checkpoint(case: str) -> Path:
    folder = ROOT / case
    if folder.name == "universal":
        return folder
    return folder / "checkpoint" if (folder / "checkpoint").is_dir() else next(folder.glob("checkpoint-*"))


@cache
def index_of(case: str) -> Index:
    reader = DeepSpeedUniversalFormat() if case.endswith("/universal") else DeepSpeedFormat()
    return reader.read(checkpoint(case))


def bits(ref: TensorRef) -> np.ndarray:
    """All elements of a contiguous tensor, as unsigned words."""
    assert ref.is_contiguous
    data = file_bytes(ref.path)[ref.offset : ref.offset + ref.nbytes]
    return np.frombuffer(data, dtype=WORDS[ref.dtype.itemsize]).reshape(ref.shape)


@cache
def file_bytes(path: str) -> bytes:
    return Path(path).read_bytes()


def source_words(piece: Piece) -> np.ndarray:
    """Elements of a piece, as unsigned words."""
    word = WORDS[piece.ref.dtype.itemsize]
    if isinstance(piece.ref, InlineTensor):
        return np.frombuffer(piece.ref.data, dtype=word).reshape(piece.sizes)
    at = piece.ref.offset + piece.src_offset
    return np.ndarray(piece.sizes, word, file_bytes(piece.ref.path), at, piece.src_strides)


def gathered(state: StateIndex) -> np.ndarray:
    """The whole state, put together from its pieces."""
    target = full_slice("p", "s", state)
    return filled(state, resolve(target, Locator(state), 0, target.stop))


def filled(state: StateIndex, pieces: tuple[Piece, ...]) -> np.ndarray:
    out = np.zeros(state.numel, dtype=WORDS[pieces[0].ref.dtype.itemsize] if pieces else np.uint8)
    for piece in pieces:
        strides = tuple(step * out.itemsize for step in piece.dst_strides)
        np.ndarray(piece.sizes, out.dtype, out, piece.dst_offset * out.itemsize, strides)[...] = source_words(piece)
    return out.reshape(state.global_shape)


def as_float32(words: np.ndarray, dtype: DType) -> np.ndarray:
    match dtype:
        case DType.BFLOAT16:
            return (words.astype(np.uint32) << 16).view(np.float32)
        case DType.FLOAT16:
            return words.view(np.float16).astype(np.float32)
        case _:
            return words.view(np.float32)


def expected(case: str, name: str, state: str) -> TensorRef | None:
    return truth_of(case).tensors.get(f"{name}/{state}")


@pytest.mark.parametrize("case", CASES)
def test_pieces_tile_every_tensor(case: str) -> None:
    check_cover(index_of(case))


@pytest.mark.parametrize("case", CASES)
def test_every_state_of_the_truth_is_read_bit_for_bit(case: str) -> None:
    index, truth = index_of(case), truth_of(case)
    checked = 0
    for key, ref in truth.tensors.items():
        name, _, state = key.rpartition("/")
        if state == "module" or f"{name}/weight" not in truth.tensors:
            continue
        found = index.atoms[name].states[state]
        assert found.dtype is ref.dtype, key
        np.testing.assert_array_equal(gathered(found), bits(ref), err_msg=key)
        checked += 1
    assert checked >= 11


@pytest.mark.parametrize("case", CASES)
def test_no_state_is_there_that_the_truth_lacks(case: str) -> None:
    truth = truth_of(case)
    for atom, state, _ in index_of(case).states():
        known = f"{atom.name}/{state}" in truth.tensors or state in ("step", "calls")
        assert known or (state == "weight" and f"{atom.name}/module" in truth.tensors), f"{atom.name}/{state}"


@pytest.mark.parametrize("case", CASES)
def test_frozen_parameters_and_buffers_are_the_modules_own(case: str) -> None:
    index, report = index_of(case), truth_of(case).report
    for atom in index.atoms.values():
        if expected(case, atom.name, "weight") is None:
            ref = expected(case, atom.name, "module")
            assert ref is not None, atom.name
            assert atom.states["weight"].dtype is ref.dtype
            np.testing.assert_array_equal(gathered(atom.states["weight"]), bits(ref), err_msg=atom.name)
    excluded = set(report["frozen"]) if report["case"]["exclude_frozen"] else set()
    lost = {line.partition(":")[0] for line in index.dropped}
    everything = {key.rpartition("/")[0] for key in truth_of(case).tensors if key.endswith("/module")}
    assert set(index.atoms) == everything - excluded - lost


@pytest.mark.parametrize("case", CASES)
def test_copies_are_the_weight_rounded_to_the_type_of_the_model(case: str) -> None:
    for atom in index_of(case).atoms.values():
        state = atom.states["weight"]
        target = full_slice(atom.name, "weight", state)
        for pieces in resolve_replicas(target, Locator(state), 0, target.stop):
            dtype = pieces[0].ref.dtype
            copy = as_float32(filled(state, pieces), dtype) if dtype.is_floating else filled(state, pieces)
            master = gathered(state)
            if dtype is state.dtype:
                np.testing.assert_array_equal(filled(state, pieces), master)
                continue
            exact = as_float32(master, state.dtype)
            tolerance = 2.0**-8 if dtype is DType.BFLOAT16 else 2.0**-10  # half a unit in the last place, and a bit
            np.testing.assert_allclose(copy, exact, rtol=tolerance, atol=6.2e-5, err_msg=atom.name)


@pytest.mark.parametrize("case", CASES)
def test_kinds_ties_step_and_topology(case: str) -> None:
    index, report = index_of(case), truth_of(case).report
    buffers = [atom.name for atom in index.atoms.values() if atom.kind is Kind.BUFFER]
    assert sorted(buffers) == sorted(report["buffers"])
    assert index.aliases == report["aliases"]
    assert index.step == report["step"]
    assert (index.topology.dp, index.topology.zero) == (report["world_size"], report["case"]["stage"])
    frozen = {atom.name for atom in index.atoms.values() if atom.kind is Kind.FROZEN}
    assert frozen <= {*report["frozen"], *report["empty"]}


@pytest.mark.parametrize("case", CASES)
def test_atoms_are_in_the_order_of_the_model(case: str) -> None:
    index = index_of(case)
    path = next(file.path for file in index.files if file.role.startswith("model states"))
    module = read_archive(path).root["module"]
    assert list(index.atoms) == [name for name in module if name in index.atoms]
    assert len(module) == len(index.atoms) + len(index.aliases) + sum("placeholder" in line for line in index.dropped)


@pytest.mark.parametrize("case", CASES)
def test_groups_and_steps(case: str) -> None:
    index, report = index_of(case), truth_of(case).report
    assert len(index.groups) == len(report["groups"])
    zero = report["ds_config"]["zero_optimization"]
    for found, group in zip(index.groups, report["groups"], strict=True):
        names = [name for name in found.params if name not in report["empty"]]
        order = group["names"]
        if zero.get("round_robin_gradients"):
            order = list(undo_round_robin(order, ranks=report["world_size"]))
        assert names == [name for name in order if name not in report["empty"]]
        readable = json.loads(json.dumps(found.hyper))
        assert {k: v for k, v in readable.items() if k != "initial_lr"} == {
            k: v for k, v in group["hyperparameters"].items() if k != "initial_lr"
        }
        for name in names:
            check_step(index.atoms[name].states.get("step"), group["step"])


def check_step(state: StateIndex | None, step: float | None) -> None:
    if step is None or state is None:
        assert state is None
        return
    words = gathered(state).reshape(())
    value = int(words) if state.dtype is DType.INT64 else float(words.view(np.float32))
    assert value == step


@pytest.mark.parametrize("case", CASES)
def test_configuration_and_scheduler_are_kept(case: str) -> None:
    report = truth_of(case).report
    extras = {extra.name: extra.value for extra in index_of(case).extras if extra.rank is None}
    assert extras["ds_config"] == report["ds_config"]
    assert extras.get("lr_scheduler") == report["lr_scheduler"]
    engine = extras["engine"]
    assert (engine["global_steps"], engine["skipped_steps"]) == (report["step"], report["skipped_steps"])


@pytest.mark.parametrize("case", CASES)
def test_every_file_is_named_and_every_read_byte_has_a_checksum(case: str) -> None:
    index = index_of(case)
    folder = Path(index.path)
    beside = {file.path for file in index.files if file.role == "companion file"}
    assert beside == {
        str(path) for path in folder.parent.iterdir() if path.is_file() and not path.name.startswith("latest")
    }
    assert {file.path for file in index.files} - beside == {str(path) for path in folder.rglob("*.pt")}
    assert all(Path(file.path).stat().st_size == file.nbytes for file in index.files)
    spans = {(record.path, record.offset) for record in index.records}
    if "legacy" not in case:
        refs = [f.ref for _, _, state in index.states() for f in state.fragments if isinstance(f.ref, TensorRef)]
        starts = {path: sorted(offset for own, offset in spans if own == path) for path, _ in spans}
        assert all(ref.offset >= starts[ref.path][0] for ref in refs)
    else:
        assert not spans


def test_client_state_is_kept() -> None:
    report = truth_of("z2-dp2-client-state").report["client_state"]
    extras = {extra.name: extra.value for extra in index_of("z2-dp2-client-state").extras}
    found = extras["client_state"]
    assert found.keys() == report.keys()
    assert (found["epoch"], found["best"]) == (report["epoch"], report["best"])
    ema = found["ema"]["weight"]
    assert bits(ema).tobytes().hex() == report["ema"]["weight"]["hex"]
    assert bits(found["rng_state"]).tobytes().hex() == report["rng_state"]["hex"]


@pytest.mark.parametrize("folder", sorted(REFUSED))
def test_other_layouts_are_recognised_and_refused_by_name(folder: str) -> None:
    readers = (DeepSpeedFormat(), DeepSpeedUniversalFormat())
    (reader,) = (reader for reader in readers if reader.detect(ROOT / folder))
    with pytest.raises(UnsupportedError, match=REFUSED[folder]):
        reader.read(ROOT / folder)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("z3-dp2-lion", "zero_pp_rank_#_mp_rank_00_optim_states"),
        ("z3-dp2-fp16", "zero_pp_rank_#_mp_rank_00_model_states"),
        ("z0-pp2", "layer_0#-model_states"),
        ("z0-tp2-dp2", "mp_rank_0#_model_states"),
        ("z0-ep2-dp4", "expp_rank_#_mp_rank_00_optim_states"),
        ("z0-ep2-dp4", "layer_0_expert_#_mp_rank_00_model_states"),
    ],
)
def test_files_that_were_exchanged_are_refused(case, name, tmp_path):
    root = Path(shutil.copytree(ROOT / case / "checkpoint", tmp_path / case))
    one, other = sorted(root.glob(f"*/{name.replace('#', '[01]')}.pt"))
    one.rename(tmp_path / "aside")
    other.rename(one)
    (tmp_path / "aside").rename(other)
    with pytest.raises(MalformedError, match=rf"{one.name} was saved as {other.name}.*were exchanged"):
        DeepSpeedFormat().read(root)


@pytest.mark.parametrize(("src", "dst"), [("fp32", "exp_avg"), ("exp_avg", "1xp_avg")])
def test_a_state_under_the_name_of_another(src, dst, tmp_path):
    root = Path(shutil.copytree(ROOT / "z1-dp4-fp32" / "universal", tmp_path / "universal"))
    folder = next(root.glob("*/zero/l2.bias"))
    shutil.copyfile(folder / f"{src}.pt", folder / f"{dst}.pt")
    with pytest.raises(MalformedError, match=rf"l2\.bias/{dst}\.pt: expected the file .*; got {src}\.pt"):
        DeepSpeedUniversalFormat().read(root)


def test_a_layer_that_was_renamed(tmp_path):
    root = Path(shutil.copytree(ROOT / "z0-pp2" / "checkpoint", tmp_path / "z0-pp2"))
    (path,) = root.glob("*/layer_01-model_states.pt")
    path.rename(path.with_name("layer_41-model_states.pt"))
    with pytest.raises(MalformedError, match=r"was saved as layer_01-model_states\.pt, and there is none of that name"):
        DeepSpeedFormat().read(root)
