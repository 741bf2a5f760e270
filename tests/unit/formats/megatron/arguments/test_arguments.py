"""The arguments of a run."""

from __future__ import annotations

import pytest
from ucp_formats.megatron.arguments import Arguments, read_arguments

from ucp.core.topology import Topology
from ucp.errors import MalformedError
from ucp.io.pickle.values import GlobalName, Stub


def namespace(module: str = "argparse", qualname: str = "Namespace", **values: object) -> Stub:
    return Stub(GlobalName(module, qualname), state=values, has_state=True)


def test_none_says_nothing() -> None:
    found = read_arguments(None, "a.pt")
    assert found == Arguments(raw={})
    assert found.topology() == Topology()


def test_old_names_are_understood_and_new_ones_win() -> None:
    assert read_arguments({"model_parallel_size": 2}, "a.pt").tp == 2
    both = {"model_parallel_size": 2, "tensor_model_parallel_size": 4}
    assert read_arguments(both, "a.pt").tp == 4


def test_flags_may_be_numbers() -> None:
    assert read_arguments({"untie_embeddings_and_output_weights": 0}, "a.pt").has_output_weight is False


@pytest.mark.parametrize(("name", "value"), [("num_layers", "4"), ("num_layers", True), ("swiglu", "yes")])
def test_values_of_another_kind_are_refused(name: str, value: object) -> None:
    with pytest.raises(MalformedError, match=rf" {name} .*a\.pt; got "):
        read_arguments({name: value}, "a.pt")


@pytest.mark.parametrize("value", [[1], 7, Stub(GlobalName("evil", "Thing"), state={"a": 1})])
def test_what_is_no_namespace_is_refused(value: object) -> None:
    with pytest.raises(MalformedError, match=r"namespace .*a\.pt; got "):
        read_arguments(value, "a.pt")
