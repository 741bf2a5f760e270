import pytest

from ucp.core.index import AtomIndex, Index, Kind, ParamGroup, StateIndex
from ucp.core.tensor import DType
from ucp.core.topology import Topology
from ucp.live.match.items import Findings, filter_fitting, find_unexpected, match_states, match_tensors, plan_weights
from ucp.live.parts import LiveParam, LivePart, LiveTensor

FLOAT = DType.FLOAT32


def state(shape=(2, 3), dtype=FLOAT):
    return StateIndex(dtype=dtype, global_shape=shape, fragments=())


def atom(name, shape=(2, 3), dtype=FLOAT, **states):
    own = {"weight": state(shape, dtype), **states}
    return AtomIndex(name=name, global_shape=shape, kind=Kind.PARAMETER, states=own)


def index(*atoms, aliases=None, groups=()):
    return Index(
        path="/ckpt",
        format="ucp",
        evidence=(),
        producer="",
        topology=Topology(),
        step=3,
        atoms={own.name: own for own in atoms},
        aliases=aliases or {},
        groups=groups,
    )


def live(*names, shape=(2, 3), dtype=FLOAT):
    return LiveTensor(names=names, dtype=dtype, part=LivePart.full(shape))


def matched(tensors, source, rename=None):
    findings = Findings()
    named = match_tensors(tensors, source, rename=rename, findings=findings)
    found = filter_fitting(tensors, named, source, findings)
    find_unexpected(tensors, set(named.values()), source, findings)
    return found, findings


def test_a_tensor_without_elements_need_not_be_there():
    found, findings = matched([live("a"), live("void", shape=(0, 3))], index(atom("a")))
    assert found == {"a": "a"}
    assert not findings.missing
    assert findings.notes == ["void has no elements, and is not in the checkpoint"]


def test_tied_names_need_only_one_atom():
    tensors = [live("emb", "head")]
    assert matched(tensors, index(atom("emb"), aliases={"head": "emb"}))[0] == {"emb": "emb"}
    assert matched(tensors, index(atom("head")))[0] == {"emb": "head"}
    assert not matched(tensors, index(atom("emb")))[1].problems


def test_tied_in_the_model_and_two_atoms_is_a_problem():
    found, findings = matched([live("emb", "head")], index(atom("emb"), atom("head")))
    assert found == {"emb": "emb"}
    assert "emb and head are one tensor in the model, and 2 in the checkpoint" in findings.problems[0]


def test_tied_in_the_checkpoint_and_two_in_the_model_is_noted():
    found, findings = matched([live("emb"), live("head")], index(atom("emb"), aliases={"head": "emb"}))
    assert found == {"emb": "emb", "head": "emb"}
    (note,) = findings.notes
    assert note == "emb and head are loaded from one tensor of the checkpoint, emb: they were tied when saved"
    assert not findings.problems


@pytest.mark.parametrize(
    ("names", "held", "hint"),
    [
        (["a.w", "b"], ["model.a.w", "model.b"], "pass rename=lambda name: 'model.' + name"),
        (["net.a.w", "net.b"], ["a.w", "b"], "pass rename=lambda name: name.removeprefix('net.')"),
        (
            ["a.w", "c"],
            ["model.a.w", "model.b"],
            "pass rename=FUNCTION, from a name in the model to the name in the checkpoint",
        ),
        (["net.a.w", "a.w"], ["a.w", "c"], None),
        (
            ["w"],
            ["a.w", "b.w", "c.w", "d.w"],
            "pass " + ", or ".join(f"rename=lambda name: '{own}.' + name" for own in "abc"),
        ),
    ],
)
def test_a_common_prefix_is_named(names, held, hint):
    _, findings = matched([live(name) for name in names], index(*map(atom, held)))
    assert findings.hints == ([hint] if hint else [])


def test_types_are_cast_among_floats_only():
    tensors = [live("a", dtype=DType.BFLOAT16), live("b", dtype=DType.INT64), live("c")]
    source = index(atom("a"), atom("b"), atom("c", dtype=DType.INT64))
    found, findings = matched(tensors, source)
    assert found == {"a": "a"}
    assert findings.problems == [
        "b is int64 in the model and float32 in the checkpoint",
        "c is float32 in the model and int64 in the checkpoint",
    ]
    (want,) = plan_weights(tensors, found, source, findings=findings)
    assert want.slice.dtype is DType.BFLOAT16
    assert findings.casts == {"weight: float32 -> bfloat16": 1}


def test_an_atom_without_a_weight_is_missing():
    own = AtomIndex(name="a", global_shape=(2, 3), kind=Kind.PARAMETER, states={"exp_avg": state()})
    found, findings = matched([live("a")], index(own))
    assert not found
    assert findings.missing == ["a: the checkpoint has only exp_avg of it"]


ADAM = {"step": None, "exp_avg": FLOAT}


def adam_atom(name, **changed):
    return atom(name, **{"step": state((), DType.INT64), "exp_avg": state(), **changed})


def states_of(params, source):
    findings = Findings()
    names = {name: name for name in source.atoms}
    parts = {name: LivePart.full(own.global_shape) for name, own in source.atoms.items()}
    stepped = {param.name for param in params}
    wants, fresh = match_states(params, parts, names, source, optimized=stepped, findings=findings)
    return [(want.name, want.state, want.slice.dtype) for want in wants], fresh, findings


def test_states_are_brought_as_the_optimizer_keeps_them():
    keeps = {"step": FLOAT, "exp_avg": DType.BFLOAT16}
    wants, fresh, findings = states_of([LiveParam(name="a", keeps=keeps)], index(adam_atom("a")))
    assert wants == [("a", "step", DType.INT64), ("a", "exp_avg", DType.BFLOAT16)]
    assert not fresh
    assert findings.casts == {"exp_avg: float32 -> bfloat16": 1}


def test_states_of_an_unknown_optimizer_are_brought_as_stored():
    wants, _, findings = states_of([LiveParam(name="a", keeps=None)], index(adam_atom("a")))
    assert wants == [("a", "step", DType.INT64), ("a", "exp_avg", FLOAT)]
    assert not findings.problems


@pytest.mark.parametrize("keeps", [{**ADAM, "exp_avg_sq": FLOAT}, {"step": None}, {"momentum_buffer": FLOAT}, {}])
def test_other_states_than_the_optimizer_keeps_are_a_problem(keeps):
    wants, _, findings = states_of([LiveParam(name="a", keeps=keeps)], index(adam_atom("a")))
    assert not wants
    assert "the checkpoint has step, exp_avg" in findings.problems[0]


def test_a_step_count_that_the_optimizer_does_not_keep_is_left_out():
    params = [LiveParam(name=name, keeps={"exp_avg": FLOAT}) for name in "ab"]
    wants, _, findings = states_of(params, index(adam_atom("a"), adam_atom("b")))
    assert [want[1] for want in wants] == ["exp_avg", "exp_avg"]
    assert findings.notes == ["step counts are dropped: the optimizer keeps none"]


def test_a_parameter_that_was_never_stepped_is_fresh():
    source = index(atom("a"), adam_atom("b"), groups=(ParamGroup(params=("a", "b"), hyper={}),))
    _, fresh, findings = states_of([LiveParam(name="a", keeps=ADAM), LiveParam(name="b", keeps=ADAM)], source)
    assert fresh == ["a"]
    assert not findings.problems


def test_a_parameter_that_was_not_optimised_is_a_problem():
    source = index(atom("a"), adam_atom("b"), groups=(ParamGroup(params=("b",), hyper={}),))
    params = [LiveParam(name=name, keeps=ADAM) for name in ("a", "b")]
    _, _, findings = states_of(params, source)
    assert findings.problems == ["a is optimised now, but was not when the checkpoint was saved"]


def test_a_frozen_parameter_in_a_group_need_not_have_been_optimised():
    source = index(atom("a"), adam_atom("b"), groups=(ParamGroup(params=("b",), hyper={}),))
    params = [LiveParam(name="a", keeps=ADAM, is_frozen=True), LiveParam(name="b", keeps=ADAM)]
    _, fresh, findings = states_of(params, source)
    assert not findings.problems
    assert fresh == ["a"]


def test_a_checkpoint_of_weights_only_is_one_problem():
    params = [LiveParam(name=name, keeps=ADAM) for name in ("a", "b")]
    _, fresh, findings = states_of(params, index(atom("a"), atom("b")))
    (problem,) = findings.problems
    assert "weights only" in problem
    assert "leave optimizer= out" in problem
    assert fresh == ["a", "b"]


def test_a_parameter_without_elements_needs_no_state():
    _, fresh, findings = states_of([LiveParam(name="a", keeps=ADAM)], index(atom("a", shape=(0, 3))))
    assert fresh == ["a"]
    assert not findings.problems


def test_states_that_the_optimizer_does_not_step_are_a_problem():
    source = index(adam_atom("a"), adam_atom("b"))
    _, _, findings = states_of([LiveParam(name="a", keeps=ADAM)], source)
    assert findings.problems == ["b: the checkpoint has step, exp_avg, but the optimizer does not step it"]


def test_a_state_of_another_kind_of_number_is_a_problem():
    source = index(adam_atom("a", exp_avg=state(dtype=DType.INT8)))
    _, _, findings = states_of([LiveParam(name="a", keeps=ADAM)], source)
    assert findings.problems == ["a/exp_avg is float32 in the optimizer, int8 in the checkpoint"]
