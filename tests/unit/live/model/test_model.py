import pytest
import torch
from torch import nn

from ucp.core.tensor import DType
from ucp.errors import LoadError, UnsupportedError
from ucp.live.model.module import describe_modules
from ucp.live.parts import LivePart, LiveTensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("ramp", torch.zeros(2), persistent=False)


PLAIN = (
    LiveTensor(names=("scale",), dtype=DType.BFLOAT16, part=LivePart.full(())),
    LiveTensor(names=("emb.weight", "head.weight"), dtype=DType.FLOAT32, part=LivePart.full((4, 3))),
    LiveTensor(names=("seen",), dtype=DType.INT64, part=LivePart.full(())),
)


def test_a_module_is_its_parameters_and_persistent_buffers():
    net = Net()
    found = describe_modules([net])
    assert found.tensors == PLAIN
    assert found.handles["emb.weight"] is net.emb.weight
    assert found.owners[id(net.head.weight)] == "emb.weight"


def test_parameters_that_share_memory_are_tied():
    net = nn.Module()
    net.a = nn.Parameter(torch.zeros(2, 2))
    net.b = nn.Parameter(net.a.data)
    found = describe_modules([net])
    assert [own.names for own in found.tensors] == [("a", "b")]
    assert found.owners[id(net.b)] == "a"


@pytest.mark.parametrize(
    "cut",
    [
        lambda base: (base[:4], base[2:]),
        lambda base: (base, base.t()),
        lambda base: (base, base.reshape(-1)),
        lambda base: (base[:, :3], base[:, 2:]),
        lambda base: (base[:2].view(torch.bfloat16), base[1:]),
    ],
    ids=["rows", "transposed", "reshaped", "columns", "of-another-type"],
)
def test_parameters_that_share_some_memory_are_refused(cut):
    net = nn.Module()
    net.other = nn.Parameter(torch.zeros(2))
    net.a, net.b = (nn.Parameter(own) for own in cut(torch.zeros(6, 6)))
    with pytest.raises(LoadError, match=r"\n +a and b\n"):
        describe_modules([net])


def test_parameters_may_be_cut_from_one_memory():
    base = torch.zeros(4, 6)
    net = nn.Module()
    net.a, net.b = nn.Parameter(base[:, ::2]), nn.Parameter(base[:, 1::2])
    assert [own.name for own in describe_modules([net]).tensors] == ["a", "b"]


def test_a_parameter_that_is_expanded_is_refused():
    net = nn.Module()
    net.ids = nn.Buffer(torch.arange(3).expand(1, -1))
    assert [own.name for own in describe_modules([net]).tensors] == ["ids"]
    net.wide = nn.Parameter(torch.zeros(1, 2).expand(4, 2))
    with pytest.raises(LoadError, match=r"wide: .*expanded"):
        describe_modules([net])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while torch.compile is imported
def test_torch_compile_is_seen_through():
    assert describe_modules([torch.compile(Net())]).tensors == PLAIN
    net = nn.Sequential(torch.compile(nn.Linear(2, 2)))
    assert [own.name for own in describe_modules([net]).tensors] == ["0.weight", "0.bias"]


def test_activation_checkpointing_is_seen_through():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = nn.BatchNorm1d(2)
    names = [own.name for own in describe_modules([nn.Sequential(checkpoint_wrapper(inner))]).tensors]
    assert names == [f"0.{name}" for name in inner.state_dict()]


def test_data_parallel_is_seen_through():
    assert describe_modules([nn.DataParallel(Net())]).tensors == PLAIN


def test_a_module_of_the_user_called_module_keeps_its_name():
    net = nn.Module()
    net.module = nn.Linear(2, 2, bias=False)
    assert [own.name for own in describe_modules([net]).tensors] == ["module.weight"]


def test_extra_state_is_noted():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"seen": 1}

    assert describe_modules([nn.Sequential(Extra(2, 2))]).notes == ("not restored, set it yourself: 0._extra_state",)


def test_parameters_without_a_shape_are_refused_all_at_once():
    with pytest.raises(LoadError, match=r"0\.weight: its shape (.*\n)+ +1\.bias: its shape "):
        describe_modules([nn.Sequential(nn.LazyLinear(3, bias=False), nn.LazyLinear(3))])


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_an_element_type_that_checkpoints_lack_is_refused():
    net = nn.Module()
    net.register_buffer("odd", torch.zeros(2, dtype=torch.complex32))
    with pytest.raises(LoadError, match=r"odd: .*torch\.complex32"):
        describe_modules([net])


def test_sharded_parameters_are_refused():
    net = nn.Linear(2, 2)
    net.weight.ds_id = 0
    with pytest.raises(UnsupportedError, match=r"weight: .*ZeRO-3"):
        describe_modules([net])


def test_a_module_that_a_framework_cuts_is_refused():
    wrapper = type("PipelineModule", (nn.Module,), {})()
    wrapper.inner = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match="PipelineModule"):
        describe_modules([nn.Sequential(wrapper)])
