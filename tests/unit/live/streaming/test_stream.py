"""`ucp.stream`: the outputs of the whole model, with some layers and experts in memory."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ucp
from ucp.errors import ChangedError, LoadError, MissingFileError, UnsupportedError, UsageError
from ucp.streaming.experts import ExpertStore


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Stacked(nn.Module):
    def __init__(self, experts: int, at_once: bool) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(experts, 16, 8)), nn.Parameter(torch.randn(experts, 8, 16))
        self.at_once = at_once

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        if self.at_once:
            return torch.einsum("th,ehk->tk", x, self.w1)
        out = torch.zeros_like(x)
        for expert in chosen.unique():
            tokens = chosen == expert
            hidden = torch.relu(nn.functional.linear(x[tokens], self.w1[expert]))
            out[tokens] = nn.functional.linear(hidden, self.w2[expert])
        return out


class Mixture(nn.Module):
    def __init__(self, kind: str, experts: int = 6) -> None:
        super().__init__()
        self.gate = nn.Linear(8, experts, bias=False)
        self.is_stacked = kind != "modules"
        self.experts: nn.Module = (
            Stacked(experts, kind == "at once") if self.is_stacked else nn.ModuleList(Expert() for _ in range(experts))
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        chosen = self.gate(flat).argmax(-1)
        if self.is_stacked:
            return self.experts(flat, chosen).reshape(x.shape)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts.children()):
            if (tokens := chosen == number).any():
                out[tokens] = expert(flat[tokens])
        return out.reshape(x.shape)


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), Mixture(kind) if kind else Expert()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, kind: str = "", layers: int = 5, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(layers))
        self.head = nn.Linear(8, 20, bias=False)
        if tied:
            self.head.weight = self.embed.weight
            self.layers[2].norm = self.layers[0].norm

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def save(model: nn.Module, folder: Path) -> Path:
    torch.save(model.state_dict(), folder / "model.pt")
    return folder / "model.pt"


def start(model: Model, kind: str, folder: Path, **options: object) -> tuple[Model, ucp.Stream]:
    """A model like `model`, on the meta device, that is streamed from what was saved of it."""
    with torch.device("meta"):
        streamed = Model(kind, len(model.layers))
    return streamed, ucp.stream(streamed, save(model, folder), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["", "modules", "rows"])
@pytest.mark.parametrize("slots", [2, 4, 9])
def test_outputs_are_those_of_the_whole_model(kind: str, slots: int, tmp_path: Path) -> None:
    model = Model(kind)
    streamed, stream = start(model, kind, tmp_path, slots=slots, cache_nbytes=6000)
    for seed in range(4):
        tokens = torch.randint(0, 20, (3, 4), generator=torch.Generator().manual_seed(seed))
        assert torch.equal(streamed(tokens), model(tokens))
    assert bool(stream.cache_misses) is bool(kind)
    stream.close()


@pytest.mark.parametrize("slots", [2, 3])
def test_a_layer_is_read_once_for_each_pass(slots: int, tmp_path: Path) -> None:
    streamed, stream = start(Model(), "", tmp_path, slots=slots)
    for _ in range(3):
        streamed(torch.zeros(1, 2, dtype=torch.long))
    stream.close()
    assert stream.nbytes_read == (slots + 3 * 5) * stream.nbytes // 5


def test_layers_out_of_turn_and_shared_tensors(tmp_path: Path) -> None:
    model = Model(tied=True)
    streamed = Model(tied=True)
    stream = ucp.stream(streamed, save(model, tmp_path), slots=2)
    x = torch.randn(2, 8)
    for number in (3, 0, 0, 4, 1):
        assert torch.equal(streamed.layers[number](x), model.layers[number](x))
    assert "5 layers" in str(stream)
    stream.close()


def test_all_experts_at_once_are_refused(tmp_path: Path) -> None:
    streamed, stream = start(Model("at once"), "at once", tmp_path)
    with pytest.raises(UnsupportedError):
        streamed(torch.zeros(1, 2, dtype=torch.long))
    stream.close()


def test_mistakes_are_told_before_anything_is_read(tmp_path: Path) -> None:
    path = save(Model(), tmp_path)
    for wrong in ({"slots": 1}, {"layers": "blocks"}, {"cache_nbytes": 0}, {"threads": -1}, {"threads": "x"}):
        with pytest.raises(UsageError):
            ucp.stream(Model(), path, **wrong)  # type: ignore[arg-type]  # on purpose
    for model in (nn.Linear(2, 2), None, [Model()]):
        with pytest.raises(UsageError):
            ucp.stream(model, path)  # type: ignore[arg-type]
    with pytest.raises(LoadError):
        ucp.stream(Model(layers=6), path)


def test_a_file_that_disappears_is_named_by_the_layer_that_needs_it(tmp_path: Path) -> None:
    path = save(Model(), tmp_path)
    streamed = Model()
    stream = ucp.stream(streamed, path)
    path.unlink()
    tokens = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(MissingFileError):
        [streamed(tokens) for _ in range(3)]
    stream.close()


@pytest.mark.parametrize("nbytes", [100, 7000, 20_000])
def test_a_call_of_all_experts_reads_each_once(nbytes: int, tmp_path: Path) -> None:
    streamed, stream = start(Model("rows", layers=3), "rows", tmp_path, cache_nbytes=nbytes)
    store = stream._experts
    assert isinstance(store, ExpertStore)
    experts = [layer.mlp.experts for layer in streamed.layers]
    whole = ucp.open(tmp_path / "model.pt")
    for turn in range(4):
        before = stream.cache_misses + stream.cache_hits
        for number, module in enumerate(experts):
            module(torch.randn(6, 8), torch.arange(6))
            choice = module.w1._choice
            choice.begin(range(6))
            for expert in (5, 0, 3):  # in another order than that of reading
                for name in ("w1", "w2"):
                    expected = whole.read(f"layers.{number}.mlp.experts.{name}")[expert]
                    assert torch.equal(getattr(module, name)[expert], expected), turn
            choice.end()
        assert stream.cache_misses + stream.cache_hits - before >= 18
    assert stream.cache_hits
    assert len(store._passing) + len(store._free) + len(list(store.cache)) == store.num_buffers
    stream.close()


def test_a_cache_takes_no_more_than_all_experts(tmp_path: Path) -> None:
    path = save(Model("rows", layers=3), tmp_path)
    with torch.device("meta"):
        models = [Model("rows", layers=3) for _ in range(2)]
    streams = [
        ucp.stream(model, path, cache_nbytes=nbytes) for model, nbytes in zip(models, (1 << 20, 1 << 30), strict=True)
    ]
    assert streams[0].resident_nbytes == streams[1].resident_nbytes < 1 << 20


@torch.enable_grad()  # type: ignore[untyped-decorator]  # torch's own
def test_gradients_are_those_of_the_whole_model(tmp_path: Path) -> None:
    """Backward needs weights of layers and experts whose turn is over."""
    for kind in ("", "rows", "modules"):
        model = Model(kind)
        streamed, stream = start(model, kind, tmp_path, cache_nbytes=1)
        inputs = [torch.ones(9, 3, 8, requires_grad=True) for _ in range(2)]
        for of_run, run in zip(inputs, (model, streamed), strict=True):
            hidden = of_run * torch.arange(9).reshape(9, 1, 1)
            for layer in run.layers:
                hidden = layer(hidden)
            hidden.pow(2).sum().backward()
        stream.close()
        assert torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]  # computed above


@torch.enable_grad()  # type: ignore[untyped-decorator]  # torch's own
@pytest.mark.parametrize("kind", ["", "rows", "modules"])
def test_a_pass_with_gradients_enabled_keeps_no_layer(kind: str, tmp_path: Path) -> None:
    model = Model(kind)
    streamed = Model(kind)
    stream = ucp.stream(streamed, save(model, tmp_path), cache_nbytes=1)
    before = [slot.host.data_ptr() for slot in stream._ring._slots]
    outputs = [streamed(torch.ones(2, 3, dtype=torch.long)) for _ in range(3)]
    assert not any(output.requires_grad for output in outputs)
    assert [slot.host.data_ptr() for slot in stream._ring._slots] == before
    stream.close()


def test_rows_are_indexed_as_tensors_are(tmp_path: Path) -> None:
    model = Model("rows")
    streamed, stream = start(model, "rows", tmp_path, cache_nbytes=1)
    whole, rows = model.layers[0].mlp.experts.w1, streamed.layers[0].mlp.experts.w1  # type: ignore[union-attr]
    for index in (2, -1, torch.tensor(2), torch.tensor([2]), torch.tensor([[2]])):
        assert torch.equal(rows[index], whole[index])
    assert torch.equal(torch.stack(list(rows)), whole)
    for index in (6, -7):
        with pytest.raises(IndexError):
            rows[index]
    for several in (True, torch.tensor(True), slice(0, 1), torch.tensor([0, 1])):
        with pytest.raises(UnsupportedError):
            rows[several]
    stream.close()


def test_threads_take_turns(tmp_path: Path) -> None:
    model = Model("rows")
    streamed, stream = start(model, "rows", tmp_path, cache_nbytes=1)
    batches = [torch.full((2, 3), number) for number in range(3)]
    with torch.no_grad(), ThreadPoolExecutor(3) as pool:
        outputs = list(pool.map(lambda number: streamed(batches[number % 3]), range(15)))
    assert all(torch.equal(output, model(batches[number % 3])) for number, output in enumerate(outputs))
    stream.close()


def test_a_streamed_model_is_not_streamed_again_nor_saved(tmp_path: Path) -> None:
    path, streamed = save(Model(), tmp_path), Model()
    stream = ucp.stream(streamed, path)
    with pytest.raises(UsageError):
        ucp.stream(streamed, path)
    with pytest.raises(UnsupportedError):
        ucp.save(streamed, None, None, tmp_path / "saved")
    stream.close()
    stream.close()
    with pytest.raises(UsageError):
        [streamed(torch.zeros(1, 2, dtype=torch.long)) for _ in range(2)]


def test_a_checkpoint_that_changes_is_not_read_on(tmp_path: Path) -> None:
    path, streamed = save(Model(), tmp_path), Model()
    stream = ucp.stream(streamed, path)
    save(Model(), tmp_path)
    with pytest.raises(ChangedError):
        [streamed(torch.zeros(1, 2, dtype=torch.long)) for _ in range(3)]
    stream.close()
