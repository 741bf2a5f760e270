import pytest
import torch
from torch import nn, optim

from ucp.core.tensor import DType
from ucp.errors import LoadError, UnsupportedError
from ucp.live.model.module import describe_modules
from ucp.live.optimizer.torch_optimizer import describe_optimizer

FLOAT, HALF = DType.FLOAT32, DType.BFLOAT16
ADAM = {"step": FLOAT, "exp_avg": FLOAT, "exp_avg_sq": FLOAT}


def described(net, optimizer):
    return describe_optimizer(optimizer, describe_modules([net]))


def kept(net, optimizer, hyper=({},)):
    own = described(net, optimizer)
    return {param.name: param.keeps for param in own.params(hyper)}


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (optim.AdamW, ADAM),
        (type("Mine", (optim.AdamW,), {}), ADAM),
        (lambda p: optim.Adam(p, amsgrad=True), {**ADAM, "max_exp_avg_sq": FLOAT}),
        (lambda p: optim.AdamW(p, fused=True), ADAM),
        (lambda p: optim.SGD(p, lr=0.1), {}),
        (lambda p: optim.SGD(p, lr=0.1, momentum=0.9), {"momentum_buffer": FLOAT}),
        (lambda p: optim.RMSprop(p, centered=True), {"step": FLOAT, "square_avg": FLOAT, "grad_avg": FLOAT}),
        (optim.Adagrad, {"step": FLOAT, "sum": FLOAT}),
        (optim.NAdam, {**ADAM, "mu_product": FLOAT}),
    ],
)
def test_the_optimizer_shows_which_states_it_keeps(make, states):
    net = nn.Linear(3, 2)
    optimizer = make(net.parameters())
    before = {key: dict(value) for key, value in optimizer.state.items()}
    assert kept(net, optimizer) == {"weight": states, "bias": states}
    assert {key: dict(value) for key, value in optimizer.state.items()} == before
    assert all(param.grad is None for param in net.parameters())


def test_the_states_follow_the_parameter_and_the_hyper_parameters_to_come():
    net = nn.Linear(3, 2, dtype=torch.bfloat16)
    assert kept(net, optim.AdamW(net.parameters()))["weight"] == {"step": FLOAT, "exp_avg": HALF, "exp_avg_sq": HALF}
    sgd = optim.SGD(net.parameters(), lr=0.1)
    assert kept(net, sgd, [{"momentum": 0.9}])["weight"] == {"momentum_buffer": HALF}


class Foreign(optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})


def test_a_foreign_optimizer_keeps_what_it_holds_if_anything():
    net = nn.Linear(3, 2)
    foreign = Foreign(net.parameters())
    assert kept(net, foreign) == {"weight": None, "bias": None}
    foreign.state[net.weight] = {"step": 3, "moment": torch.zeros(2, 3, dtype=torch.bfloat16)}
    assert kept(net, foreign) == {key: {"step": None, "moment": HALF} for key in ["weight", "bias"]}


def test_an_optimizer_that_cannot_step_once_is_not_known():
    net = nn.Linear(3, 2)
    assert kept(net, optim.LBFGS(net.parameters())) == {"weight": None, "bias": None}


def test_parameters_that_are_not_of_the_model_are_refused():
    net = nn.Linear(3, 2)
    masters = [p.detach().clone().requires_grad_() for p in net.parameters()]
    with pytest.raises(LoadError, match=r"parameter 0 of group 0, .*\[2, 3\]\n +parameter 1 of group 0, .*\[2\]\n"):
        described(net, optim.AdamW(masters))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it is imported
def test_an_optimizer_around_another_is_refused():
    from torch.distributed.optim import PostLocalSGDOptimizer

    net = nn.Linear(3, 2)
    with pytest.raises(UnsupportedError, match=r"PostLocalSGDOptimizer, .*optimizer\.optim"):
        described(net, PostLocalSGDOptimizer(optim.SGD(net.parameters(), lr=0.1), averager=None))


class Counting(optim.Optimizer):
    """Keeps its steps in a form of its own."""

    def __init__(self, params, form):
        super().__init__(params, {"lr": 0.1})
        for param in self.param_groups[0]["params"]:
            self.state[param] = {"step": form}


@pytest.mark.parametrize(
    ("form", "expected"), [(7, 3), (0.5, 3.0), (None, torch.tensor(3)), (torch.tensor(0.0), torch.tensor(3.0))]
)
def test_a_count_takes_the_form_of_the_optimizer(form, expected):
    net = nn.Linear(3, 2)
    own = described(net, Counting(net.parameters(), form))
    own.params([{}])
    own.put({"weight": {"step": torch.tensor(3)}}, {"weight": frozenset({"step"})})
    found = own.handle.state[net.weight]["step"]
    assert type(found) is type(expected)
    assert found == expected
    assert getattr(found, "dtype", None) == getattr(expected, "dtype", None)


def test_states_are_replaced_or_cleared():
    net = nn.Linear(3, 2)
    own = described(net, optim.AdamW(net.parameters()))
    own.handle.state[net.bias] = {"old": 1}
    own.put({"weight": {"step": torch.tensor(2)}, "bias": {}}, {})
    assert dict(own.handle.state) == {net.weight: {"step": torch.tensor(2)}}


def test_a_tensor_hyper_parameter_is_filled_in_place():
    net = nn.Linear(3, 2)
    rate = torch.tensor(1.0)
    own = described(net, optim.AdamW(net.parameters(), lr=rate, fused=True))
    assert own.groups()[0].hyper["lr"] == 1.0
    own.put_hyper([{"lr": 0.5, "eps": 0.25}])
    assert own.handle.param_groups[0]["lr"] is rate
    assert (float(rate), own.handle.param_groups[0]["eps"]) == (0.5, 0.25)
