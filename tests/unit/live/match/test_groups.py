from ucp.core.index import ParamGroup
from ucp.live.match.groups import LiveGroup, match_groups
from ucp.live.match.items import Findings


def restored(live, saved):
    findings = Findings()
    return match_groups(live, saved, findings=findings), findings


def saved_group(*params, **hyper):
    return ParamGroup(params=params, hyper=hyper)


def live_group(*params, **hyper):
    return LiveGroup(params=params, hyper=hyper)


def test_values_are_restored_in_the_form_of_the_optimizer():
    live = live_group("a", lr=1.0, betas=(0.9, 0.95), amsgrad=False, weight_decay=0)
    hyper, findings = restored([live], [saved_group("a", lr=0.1, betas=[0.5, 0.6], amsgrad=True, weight_decay=0.25)])
    assert hyper == [{"lr": 0.1, "betas": (0.5, 0.6), "amsgrad": True, "weight_decay": 0.25}]
    assert findings.notes == [
        (
            "group 0: restored lr=0.1 (was 1.0), betas=(0.5, 0.6) (was (0.9, 0.95)), amsgrad=True (was False), "
            "weight_decay=0.25 (was 0)"
        )
    ]


def test_how_the_optimizer_computes_is_its_own():
    live = live_group("a", lr=1.0, foreach=None, fused=True, capturable=True, name="mine")
    hyper, findings = restored([live], [saved_group("a", lr=1.0, foreach=True, fused=None, capturable=False, name="x")])
    assert hyper == [{"lr": 1.0}]
    assert not findings.notes


def test_unknown_keys_are_reported_once():
    live = [live_group("a", lr=1.0), live_group("b", lr=1.0)]
    hyper, findings = restored(live, [saved_group("a", "b", lr=1.0, bias_correction=True)])
    assert hyper == [{"lr": 1.0}, {"lr": 1.0}]
    assert findings.notes == [
        f"group {n}: not restored, as the optimizer has no such setting: bias_correction=True" for n in (0, 1)
    ]


def test_one_group_out_of_two_that_agree():
    saved = [saved_group("a", lr=0.1), saved_group("b", lr=0.1)]
    hyper, findings = restored([live_group("a", "b", lr=1.0)], saved)
    assert hyper == [{"lr": 0.1}]
    assert not findings.problems


def test_one_group_out_of_two_that_differ_is_a_problem():
    saved = [saved_group("a", lr=0.1, eps=1.0), saved_group("b", "c", lr=0.2, eps=1.0)]
    hyper, findings = restored([live_group("a", "b", "c", lr=1.0, eps=2.0)], saved)
    assert hyper == [{}]
    (problem,) = findings.problems
    assert "(a of group 0, b of group 1), which differ in lr" in problem


def test_a_value_of_another_kind_is_a_problem():
    live = live_group("a", lr=1.0, betas=(0.9, 0.95), mode="x", other=1)
    hyper, findings = restored([live], [saved_group("a", lr="0.1", betas=(0.9,), mode="y", other=None)])
    assert hyper == [{"mode": "y", "other": None}]
    assert findings.problems == [
        "group 0 of the optimizer: lr: expected a value like 1.0; got '0.1'",
        "group 0 of the optimizer: betas: expected a value like (0.9, 0.95); got (0.9,)",
    ]


def test_a_checkpoint_without_groups_leaves_the_optimizer_as_it_is():
    hyper, findings = restored([live_group("a", lr=1.0)], [])
    assert hyper == [{}]
    assert findings.notes == ["the checkpoint records no hyper-parameters: the optimizer keeps its own"]


def test_a_rate_that_a_scheduler_goes_by_and_that_is_not_restored_is_noted():
    findings = Findings()
    live = LiveGroup(params=("w",), hyper={"lr": 1.0, "initial_lr": 1.0})
    match_groups([live], [ParamGroup(params=("w",), hyper={"lr": 0.1})], findings=findings)
    assert "keeps initial_lr=1.0" in findings.notes[-1]
