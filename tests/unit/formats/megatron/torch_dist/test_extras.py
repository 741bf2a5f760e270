"""What is no tensor of a parameter."""

import pytest
from ucp_formats.megatron.arguments import Arguments
from ucp_formats.megatron.torch_dist.keys import GroupObjectKey, ObjectKey
from ucp_formats.megatron.torch_dist.objects import CommonState, SavedObjects, collect_extras, is_empty

from ucp.core.tensor import DType, InlineTensor, TensorRef
from ucp.io.pickle.values import GlobalName, Stub

STREAM = GlobalName("_io", "BytesIO")


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        [],
        [None],
        [[b"", None]],
        InlineTensor(data=b"", dtype=DType.UINT8, shape=(0,)),
        TensorRef(path="x", offset=0, dtype=DType.UINT8, shape=(0,), strides=(1,)),
        Stub(STREAM, state=(b"", 0, None), has_state=True),
        Stub(STREAM, args=(b"",), new=False),
    ],
)
def test_empty(value):
    assert is_empty(value)


@pytest.mark.parametrize(
    "value", [0, False, b"x", [b"x"], {}, Stub(STREAM, state=(b"x", 0, None)), Stub(STREAM, (b"x",))]
)
def test_not_empty(value):
    assert not is_empty(value)


def common(**values):
    return CommonState(where="w", values=values, arguments=Arguments(raw={}), records=(), file="")


def test_what_groups_saved_is_kept_once_where_it_is_the_same():
    scaler, other = {"scale": 2.0}, {"scale": 4.0}
    objects = SavedObjects(
        groups={
            GroupObjectKey(None, 2, "grad_scaler"): other,
            GroupObjectKey(None, 0, "grad_scaler"): scaler,
            GroupObjectKey(None, 1, "grad_scaler"): dict(scaler),
            GroupObjectKey(1, 0, "grad_scaler"): scaler,
            GroupObjectKey(None, 0, "per_bucket_numel"): [1],
            GroupObjectKey(None, 0, "optimizer"): {},
        }
    )
    found = {extra.name: extra.value for extra in collect_extras(common(), objects)}
    assert found == {
        "optimizer/grad_scaler": scaler,
        "optimizer/grad_scaler/dp_group_2": other,
        "optimizer/1/grad_scaler": scaler,
    }


def test_objects_by_their_place():
    objects = SavedObjects(
        others={ObjectKey("rng_state", (1, 0), (2, 2)): [1], ObjectKey("a._extra_state", (3,), (4,)): b"x"},
        plain={"odd": 3},
    )
    assert {extra.name for extra in collect_extras(common(), objects)} == {
        "rng_state/pp1.tp0",
        "extra_state/a._extra_state/3",
        "object/odd",
    }


def test_what_optimizers_say_beside_groups():
    own = {"optimizer": {"param_groups": [], "state": {}, "fused": 1}, "grad_scaler": {"scale": 2}, "nothing": None}
    (extra,) = collect_extras(common(optimizer=own), SavedObjects())
    assert (extra.name, extra.value) == ("optimizer", {"grad_scaler": {"scale": 2}, "fused": 1})
    (extra,) = collect_extras(common(optimizer={0: own, 1: {}}), SavedObjects())
    assert extra.value == {"0": {"grad_scaler": {"scale": 2}, "fused": 1}}
