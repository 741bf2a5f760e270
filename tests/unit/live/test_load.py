"""`load_into` on checkpoints made by hand: one process, and several ranks that are threads."""

import os
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn, optim

from tests.unit.live.threads import run
from ucp.core.index import Fragment, Kind, ParamGroup, StateIndex
from ucp.core.region import Box
from ucp.core.tensor import DType, InlineTensor, Record
from ucp.errors import CorruptError, LoadError, UnsupportedError, UsageError
from ucp.io.provenance import size_and_time
from ucp.live.load import load_into
from ucp.live.report import LoadReport
from ucp.live.run.request import ENVIRONMENT
from ucp.testing.handmade import Shards, make_index, write_checkpoint

RANDOM = np.random.default_rng(5)


class Net(nn.Module):
    """Everything delicate in a few numbers; one parameter is not contiguous."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 7, dtype=dtype)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.emb.weight
        self.turned = nn.Parameter(torch.zeros(5, 3, dtype=dtype).t())
        self.frozen = nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False)
        self.scalar = nn.Parameter(torch.zeros((), dtype=dtype))
        self.void = nn.Parameter(torch.zeros(0, 3, dtype=dtype))
        self.register_buffer("drift", torch.zeros(7))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("ramp", torch.full((2,), 8.0), persistent=False)


SHAPES = {"turned": (3, 5), "frozen": (4,), "scalar": (), "void": (0, 3), "emb.weight": (11, 7), "drift": (7,)}
STEPPED = ("turned", "scalar", "emb.weight")
MOMENTS = ("exp_avg", "exp_avg_sq")
HYPER = {"lr": 0.125, "betas": (0.5, 0.75), "eps": 1e-6, "weight_decay": 0.25, "initial_lr": 0.5}


def random(shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(RANDOM.normal(size=shape), dtype=np.float32)


def arrays() -> dict[tuple[str, str], np.ndarray]:
    """Every state of the checkpoint, in exact float32."""
    found = {(name, "weight"): random(shape) for name, shape in SHAPES.items()}
    found["seen", "weight"] = np.array(2**40 + 1, dtype=np.int64)
    for name in STEPPED:
        found[name, "exp_avg"] = random(SHAPES[name])
        found[name, "exp_avg_sq"] = np.asarray(np.abs(random(SHAPES[name])))
        found[name, "step"] = np.array(9, dtype=np.int64)
    return found


class Saved:
    """A checkpoint by hand: rows of a tensor lie in several files, with checksums recorded for two of three."""

    def __init__(self, folder) -> None:
        self.arrays = arrays()
        shards = Shards(folder)
        states, records = {}, []
        for (name, state), array in self.arrays.items():
            if state == "step":
                ref = InlineTensor(data=array.tobytes(), dtype=DType.INT64)
                pieces = [Fragment(box=Box((), ()), ref=ref)]
            else:
                pieces = list(self._pieces(shards, array))
                records += [shards.record(p.ref) for p in pieces if p.ref.numel and not p.ref.path.endswith("2.bin")]
            dtype = DType(array.dtype.name)
            states[name, state] = StateIndex(dtype=dtype, global_shape=array.shape, fragments=tuple(pieces))
        index = make_index(folder, states, groups=[ParamGroup(params=(*STEPPED, "void"), hyper=HYPER)], records=records)
        kinds = {"frozen": Kind.FROZEN, "drift": Kind.BUFFER, "seen": Kind.BUFFER}
        atoms = {name: replace(atom, kind=kinds.get(name, Kind.PARAMETER)) for name, atom in index.atoms.items()}
        self.index = replace(index, atoms=atoms, aliases={"head.weight": "emb.weight"})
        self.path = write_checkpoint(self.index)

    @staticmethod
    def _pieces(shards, array):
        if not array.shape or not array.size:
            yield Fragment(box=Box.full(array.shape), ref=shards.put(array, file="0.bin"))
            return
        for number, rows in enumerate(np.array_split(np.arange(len(array)), 3)):
            if rows.size:
                box = Box((int(rows[0]), *(0,) * (array.ndim - 1)), (len(rows), *array.shape[1:]))
                yield Fragment(box=box, ref=shards.put(array[rows], file=f"{number}.bin", gap=number))

    def check(self, net, optimizer=None, dtype=np.float32) -> None:
        """Raise unless model and optimizer hold exactly what was saved."""
        tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        for (name, state), array in self.arrays.items():
            if state == "weight":
                found = tensors[name].detach()
            elif optimizer is None:
                continue
            else:
                found = optimizer.state[tensors[name]][state]
            wanted = torch.from_numpy(array)
            if state == "step":
                wanted = wanted.to(torch.float32)
            elif name != "drift":
                wanted = wanted.to(found.dtype)
            assert found.dtype == wanted.dtype, (name, state)
            assert torch.equal(found, wanted), (name, state)
        assert net.head.weight is net.emb.weight
        assert torch.equal(net.ramp, torch.full((2,), 8.0))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return Saved(tmp_path_factory.mktemp("saved"))


class Foreign(optim.Optimizer):
    """An optimizer that torch does not have."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 1.0, "betas": [0.0, 0.0]})


def adam(net, **options):
    return optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=7.0, **options)


def test_a_single_process_gets_everything(saved):
    net = Net()
    optimizer = adam(net)
    report = load_into(net, checkpoint=saved.path, optimizer=optimizer)
    saved.check(net, optimizer)
    assert isinstance(report, LoadReport)
    assert set(report.names) == {*SHAPES, "seen"}
    assert set(report.states) == {"step", "exp_avg", "exp_avg_sq"}
    assert (report.step, report.ranks, report.fresh) == (7, 1, ("void",))
    assert report.nbytes_read == report.nbytes_total
    assert not (report.missing)
    assert not (report.unexpected)
    assert not (report.problems)
    assert not (report.casts)
    assert not (report.dropped)
    assert [os.path.basename(path) for path in report.unchecked] == ["2.bin"]
    (group,) = optimizer.param_groups
    assert {key: group[key] for key in HYPER} == HYPER
    assert net.void not in optimizer.state


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("memory", [256, 4 << 20])
def test_ranks_share_the_reading_and_hold_the_same(saved, count, memory):
    def load(ranks):
        net = Net()
        optimizer = adam(net)
        report = load_into(
            net,
            f"dp={count}",
            checkpoint=saved.path,
            optimizer=optimizer,
            process_group=ranks,
            memory=memory,
            exchange="always",
        )
        saved.check(net, optimizer)
        return report, ranks.gathered

    found = run(count, load)
    for result in found:
        if isinstance(result, Exception):
            raise result
    reports = [report for report, _ in found]
    assert {report.ranks for report in reports} == {count}
    assert {report.nbytes_total for report in reports} == {sum(report.nbytes_read for report in reports)}
    assert len({tuple(gathered) for _, gathered in found}) == 1
    assert (len(found[0][1]) > 2) == (memory == 256)


def test_weights_alone(saved):
    net = Net()
    report = load_into(net, checkpoint=saved.path)
    saved.check(net)
    assert report.states == ()
    assert report.dropped == ("optimizer states exp_avg, exp_avg_sq, step: no optimizer was given",)


def test_states_that_are_there_are_filled_in_place(saved):
    net = Net()
    optimizer = adam(net)
    for param in net.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optimizer.step()
    before = optimizer.state[net.emb.weight]["exp_avg"]
    assert net.void in optimizer.state
    load_into(net, checkpoint=saved.path, optimizer=optimizer)
    saved.check(net, optimizer)
    assert optimizer.state[net.emb.weight]["exp_avg"] is before


def test_the_checkpoint_may_be_named_by_the_environment(saved, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, str(saved.path))
    net = Net()
    load_into(net)
    saved.check(net)


@pytest.mark.parametrize("environment", [{}, {ENVIRONMENT: ""}], ids=["unset", "empty"])
def test_a_checkpoint_must_be_named(monkeypatch, environment):
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="UCP_CHECKPOINT"):
        load_into(Net())


def test_the_topology_must_be_that_of_the_group(saved):
    with pytest.raises(UsageError, match=r"1 rank, .*; got dp=2, .* 2\. "):
        load_into(Net(), "dp=2", checkpoint=saved.path)
    load_into(Net(), "dp=1,zero=0", checkpoint=saved.path)


def test_everything_that_does_not_fit_is_in_one_error_and_nothing_is_written(saved):
    net = Net()
    net.extra = nn.Linear(2, 2)
    net.frozen = nn.Parameter(torch.zeros(9))
    del net.drift
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    optimizer = optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
    with pytest.raises(LoadError) as error:
        load_into(net, checkpoint=saved.path, optimizer=optimizer)
    text = str(error.value)
    for line in (
        "extra.weight",
        "extra.bias",
        "drift",
        "frozen has shape [9] in the model and [4] in the checkpoint",
        "scalar: the optimizer keeps momentum_buffer; the checkpoint has exp_avg, exp_avg_sq, step",
    ):
        assert f"  {line}" in text, text
    assert not optimizer.state
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_what_does_not_fit_may_be_left_as_it_is(saved):
    net = Net()
    net.extra = nn.Linear(2, 2)
    net.frozen = nn.Parameter(torch.full((9,), 3.0), requires_grad=False)
    optimizer = adam(net)
    report = load_into(net, checkpoint=saved.path, optimizer=optimizer, strict=False)
    assert report.missing == ("extra.weight", "extra.bias")
    assert report.problems == ("frozen has shape [9] in the model and [4] in the checkpoint",)
    assert torch.equal(net.frozen, torch.full((9,), 3.0))
    assert torch.equal(net.turned, torch.from_numpy(saved.arrays["turned", "weight"]))
    assert "Missing\n  - extra.weight\n" in str(report)


def test_a_checkpoint_of_something_else_is_refused_even_so(saved):
    with pytest.raises(LoadError, match=r":(.*\n)+.*rename=FUNCTION"):
        load_into(nn.Linear(3, 3), checkpoint=saved.path, strict=False)
    net = nn.Module()
    net.turned = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(LoadError, match=r"\n.*turned .*\[4, 4\] .*\[3, 5\]"):
        load_into(net, checkpoint=saved.path, strict=False)


@pytest.mark.parametrize("switch", ["strict", "verify"])
def test_switches_are_true_or_false(saved, switch):
    with pytest.raises(UsageError, match=f"{switch} .*; got 'no'"):
        load_into(nn.Linear(3, 3), checkpoint=saved.path, **{switch: "no"})


def test_names_may_be_mapped(saved):
    net = nn.Module()
    net.inner = Net()
    with pytest.raises(LoadError, match=r"pass rename=lambda name: name\.removeprefix\('inner\.'\)"):
        load_into(net, checkpoint=saved.path)
    load_into(net, checkpoint=saved.path, rename=lambda name: name.removeprefix("inner."))
    saved.check(net.inner)


def test_a_state_of_a_shape_of_its_own_is_kept_as_it_is(tmp_path):
    shards = Shards(tmp_path)
    rows = random((3, 1))
    states = {("w", "weight"): shards.whole(random((3, 4))), ("w", "row_var"): shards.whole(rows)}
    path = write_checkpoint(make_index(tmp_path, states))
    net = nn.Module()
    net.w = nn.Parameter(torch.zeros(3, 4))
    optimizer = Foreign([net.w])
    load_into(net, checkpoint=path, optimizer=optimizer)
    assert torch.equal(optimizer.state[net.w]["row_var"], torch.from_numpy(rows))


def test_hyper_parameters_stored_as_tensors_are_numbers(saved, tmp_path):
    ref = saved.index.atoms["scalar"].states["weight"].fragments[0].ref
    inline = InlineTensor(data=np.float64(0.5).tobytes(), dtype=DType.FLOAT64)
    group = ParamGroup(params=STEPPED, hyper={"lr": ref, "eps": inline})
    from ucp.live.match.decide import _plain_groups

    (plain,) = _plain_groups(replace(saved.index, groups=(group,)))
    assert plain.hyper == {"lr": float(saved.arrays["scalar", "weight"]), "eps": 0.5}


def spoiled(folder):
    """A checkpoint one byte of which has changed since its checksums were recorded."""
    own = Saved(folder)
    path = folder / "1.bin"
    data = bytearray(path.read_bytes())
    data[own.index.records[1].offset + 1] ^= 16
    path.write_bytes(data)
    files = tuple(replace(file, mtime_ns=size_and_time(file.path)[1]) for file in own.index.files)
    return write_checkpoint(replace(own.index, files=files))


@pytest.mark.parametrize("count", [1, 3])
def test_damage_is_found_on_all_ranks(tmp_path, count):
    path = spoiled(tmp_path)
    found = run(count, lambda ranks: load_into(Net(), checkpoint=path, process_group=ranks))
    assert [type(error) for error in found] == [CorruptError] * count
    assert len({str(error) for error in found}) == 1
    assert "1.bin" in str(found[0])
    assert all("partly overwritten" in error.__notes__[0] for error in found)


def one_record(folder, *, moment: int):
    """A weight and a moment of so many numbers in one file, under one checksum; a virtual store of them."""
    shards = Shards(folder)
    arrays = {("w", "weight"): random((700_000,)), ("w", "exp_avg"): random((moment,))}
    states = {name: shards.whole(array) for name, array in arrays.items()}
    data = (folder / "shard.bin").read_bytes()
    record = Record(path=str(folder / "shard.bin"), name="all", offset=0, nbytes=len(data), crc32=zlib.crc32(data))
    return arrays["w", "weight"], make_index(folder, states, records=[record])


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(700_000))


@pytest.mark.parametrize("count", [1, 2])
def test_what_lies_beside_is_read_for_the_checksum_if_it_is_little(tmp_path, count):
    weight, index = one_record(tmp_path, moment=100)
    path = write_checkpoint(index)
    nets = [Flat() for _ in range(count)]
    found = run(count, lambda ranks: load_into(nets[ranks.rank], checkpoint=path, process_group=ranks))
    assert [report.unchecked for report in found] == [()] * count
    assert found[0].nbytes_total == 4 * 700_100
    assert all(torch.equal(net.w.detach(), torch.from_numpy(weight)) for net in nets)
    damaged = bytearray((tmp_path / "shard.bin").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "shard.bin").write_bytes(damaged)
    files = tuple(replace(file, mtime_ns=size_and_time(file.path)[1]) for file in index.files)
    path = write_checkpoint(replace(index, files=files))
    found = run(count, lambda ranks: load_into(nets[ranks.rank], checkpoint=path, process_group=ranks))
    assert [type(error) for error in found] == [CorruptError] * count


def test_a_record_of_which_little_is_wanted_is_not_read_for_its_checksum(tmp_path):
    _, index = one_record(tmp_path, moment=500_000)
    report = load_into(Flat(), checkpoint=write_checkpoint(index))
    assert report.unchecked == (str(tmp_path / "shard.bin"),)
    assert report.nbytes_total == 4 * 700_000


def test_ranks_that_are_called_otherwise_are_told_apart(saved):
    found = run(2, lambda ranks: load_into(Net(), checkpoint=saved.path, process_group=ranks, strict=bool(ranks.rank)))
    (message,) = {str(error) for error in found}
    assert message.startswith("expected the same checkpoint and arguments on every rank; these differ:\n")
    assert message.endswith("\n  strict of rank 1: True, of rank 0: False")


def test_what_is_no_model_on_one_rank_is_refused_by_all(saved):
    found = run(2, lambda ranks: load_into(Net() if ranks.rank else None, checkpoint=saved.path, process_group=ranks))
    assert {str(error).partition(":")[0] for error in found} == {"rank 0 of 2"}


def test_states_made_in_inference_mode_could_not_be_stepped(saved):
    with torch.inference_mode(), pytest.raises(UsageError, match=r"outside torch\.inference_mode"):
        load_into(Net(), checkpoint=saved.path)


def test_an_optimizer_that_keeps_no_states_needs_none(tmp_path):
    shards = Shards(tmp_path)
    states = {("w", "weight"): shards.whole(random((3,)))}
    path = write_checkpoint(make_index(tmp_path, states, groups=[ParamGroup(params=("w",), hyper={"lr": 0.25})]))
    net = nn.Module()
    net.w = nn.Parameter(torch.zeros(3))
    optimizer = optim.SGD(net.parameters(), lr=1.0)
    load_into(net, checkpoint=path, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.25
    with pytest.raises(LoadError, match="without optimizer="):
        load_into(net, checkpoint=path, optimizer=optim.AdamW(net.parameters()))


def test_a_step_that_float32_does_not_hold_is_refused_before_anything_is_written(tmp_path):
    shards, inline = Shards(tmp_path), InlineTensor(data=np.int64(2**24 + 1).tobytes(), dtype=DType.INT64)
    states = {("w", state): shards.whole(random((3,))) for state in ("weight", *MOMENTS)}
    states["w", "step"] = StateIndex.from_tensor(inline)
    path = write_checkpoint(make_index(tmp_path, states, groups=[ParamGroup(params=("w",), hyper={"lr": 0.25})]))
    net = nn.Module()
    net.w = nn.Parameter(torch.zeros(3))
    with pytest.raises(UnsupportedError, match=r"w/step = 16777217"):
        load_into(net, checkpoint=path, optimizer=optim.AdamW(net.parameters()))
    assert not net.w.any()
    load_into(net, checkpoint=path)
    assert net.w.all()


def test_a_function_that_fails_is_named(saved):
    with pytest.raises(UsageError, match=r"rename\('turned'\) failed: ZeroDivisionError"):
        load_into(Net(), checkpoint=saved.path, rename=lambda name: name * (1 // 0))
    with pytest.raises(UsageError, match=r"rename\('turned'\) .*; got None"):
        load_into(Net(), checkpoint=saved.path, rename=lambda name: None)


def test_the_report_says_what_was_verified(saved):
    report = load_into(Net(), checkpoint=saved.path, verify=True)
    assert report.is_verified
    assert "\nverified  read again and equal" in str(report)


class Deaf:
    """An observer that fails at once."""

    def begin(self, *, title, nbytes):
        raise OSError(f"no terminal for {title} of {nbytes}")

    def advance(self, nbytes): ...
    def end(self): ...


@pytest.mark.parametrize("exchange", ["always", "never"])
def test_an_observer_that_fails_on_one_rank_stops_all(saved, exchange):
    def load(ranks):
        progress = Deaf() if ranks.rank else False
        return load_into(Net(), checkpoint=saved.path, process_group=ranks, progress=progress, exchange=exchange)

    found = run(2, load)
    assert {type(error) for error in found} == {LoadError}
    assert all("rank 1 of 2: OSError: no terminal for load" in str(error) for error in found)
