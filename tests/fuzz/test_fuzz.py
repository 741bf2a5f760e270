"""A slice of the fuzz, the same each time; and that the fuzz sees what it is there to see."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

import ucp.conversion.execute  # noqa: F401  # the module; the name is a function's too
from tests.fuzz.bases import BASES, Base
from tests.fuzz.mutations import Kind, Mutation, Place
from tests.fuzz.oracle import Attempt, Label, Trial, judge, judge_resumed
from tests.fuzz.trial import Fuzzer

OK_VERIFY = Attempt(verb="verify")
ERROR_DIFF = Attempt(verb="diff", code=3, text="1 difference")
ROOT = Path(__file__).parents[2]
SLICE = ("z2-dp4-bf16.packed", "make_experts-0", "window-boundary")


def base(name: str) -> Base:
    return next(own for own in BASES if own.name == name)


def test_a_slice_of_the_fuzz() -> None:
    words = ["--seed", "31", "--count", "6", "--seconds", "600", "--jobs", "1"]
    for name in SLICE:
        words += ["--base", name]
    command = [sys.executable, "-m", "tests.fuzz", *words]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 mutations" in done.stdout


def test_a_checksum_that_nobody_compares_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(place: Place, rng: Random) -> Mutation:
        pack = place.root / "packs" / "00000.safetensors"
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 1
        pack.write_bytes(data)
        return Mutation(name="flip", kind=Kind.DAMAGE, files=(str(pack),), what="a byte of a tensor")

    monkeypatch.setattr("tests.fuzz.trial.mutate", damage)
    monkeypatch.setattr("tests.fuzz.trial.RESUMED", 0.0)
    fuzzer = Fuzzer(tmp_path, 0, (base("z2-dp4-bf16.packed"),))
    assert fuzzer.run(0)[1] is Label.REFUSED
    monkeypatch.setattr(sys.modules["ucp.conversion.execute"], "find_mismatches", lambda *_: [])
    assert fuzzer.run(0)[1] is Label.SILENT


@pytest.mark.parametrize(
    ("resumed", "verify", "is_equal", "expected"),
    [
        (Attempt(verb="resume"), OK_VERIFY, True, Label.SAME),
        (Attempt(verb="resume"), OK_VERIFY, False, Label.SILENT),
        (Attempt(verb="resume"), Attempt(verb="verify", code=3, text="damaged"), True, Label.SILENT),
        (Attempt(verb="resume", code=1, text="Error: a pack is not there"), OK_VERIFY, False, Label.REFUSED),
        (Attempt(verb="resume", code=1), OK_VERIFY, False, Label.MUTE),
        (Attempt(verb="resume", failure=(Label.HANG, "")), OK_VERIFY, False, Label.HANG),
    ],
)
def test_what_resume_may_say_of_a_damaged_destination(
    resumed: Attempt, verify: Attempt, is_equal: bool, expected: Label
) -> None:
    assert judge_resumed(resumed, verify, is_equal=is_equal)[0] is expected


def test_finished_destinations_are_damaged_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.trial.RESUMED", 1.0)
    monkeypatch.setattr(Fuzzer, "change", lambda *_: pytest.fail("a source was damaged"))
    fuzzer = Fuzzer(tmp_path, 0, (base("z2-dp4-bf16"),))
    case, _, _ = fuzzer.run(0)
    assert case.mutation.name.startswith("resume_")
    assert case.path.name == "finished"


DONE = Attempt(
    verb="atoms", written={("state", "w", "weight"): "1", ("state", "w", "exp_avg"): "2", ("extra", "rng", ""): "3"}
)
ERROR = Attempt(verb="verify", code=1, text="Error: it is damaged")


OK = Attempt(verb="inspect")
WHOLE = Trial(inspect=OK, plan=OK, verify=OK, diff=OK, read=OK, atoms=DONE, target=Attempt(verb="target", tree="x"))


def _trial(**attempts: Attempt) -> Trial:
    return replace(WHOLE, **attempts)  # type: ignore[arg-type]  # names of attempts only


def _without(*item: str, told: tuple[str, ...] = ()) -> Attempt:
    written = {key: value for key, value in DONE.written.items() if key != item}
    return replace(DONE, written=written, told=frozenset(told))


@pytest.mark.parametrize(
    ("trial", "kind", "expected"),
    [
        (_trial(), Kind.DAMAGE, Label.SAME),
        (_trial(verify=ERROR), Kind.DAMAGE, Label.NOTICED),
        (_trial(atoms=ERROR, verify=ERROR, target=ERROR), Kind.DAMAGE, Label.REFUSED),
        (_trial(atoms=ERROR, target=ERROR), Kind.DAMAGE, Label.MILD),
        (_trial(atoms=ERROR, verify=ERROR), Kind.DAMAGE, Label.REFUSED),
        (_trial(atoms=ERROR, verify=ERROR, target=Attempt(verb="target", tree="y")), Kind.DAMAGE, Label.CONTRADICTION),
        (_trial(atoms=ERROR, verify=ERROR, target=ERROR), Kind.HARMLESS, Label.WRONG_REFUSAL),
        (_trial(atoms=_without("extra", "rng", "")), Kind.DAMAGE, Label.SILENT),
        (_trial(atoms=_without("extra", "rng", ""), verify=ERROR), Kind.DAMAGE, Label.SILENT),
        (_trial(atoms=_without("extra", "rng", ""), verify=ERROR), Kind.EDIT, Label.SILENT),
        (_trial(atoms=_without("extra", "rng", "", told=("rng is left behind",))), Kind.DAMAGE, Label.SAID),
        (
            _trial(atoms=_without("state", "w", "exp_avg", told=("w: exp_avg is lost",))),
            Kind.DAMAGE,
            Label.CONTRADICTION,
        ),
        (_trial(inspect=replace(ERROR, text="")), Kind.DAMAGE, Label.MUTE),
        (_trial(inspect=replace(ERROR, failure=(Label.HANG, ""))), Kind.DAMAGE, Label.HANG),
        (replace(WHOLE, leftover="the source was written to"), Kind.DAMAGE, Label.LEFTOVER),
    ],
)
def test_what_may_be_and_what_not(trial: Trial, kind: Kind, expected: Label) -> None:
    mutation = Mutation(name="flip", kind=kind, files=("a.pt",), what="")
    assert judge(base("z3-dp2-lion"), mutation, WHOLE, trial)[0] is expected


def test_a_file_that_its_own_library_refuses_is_to_be_reported() -> None:
    mutation = Mutation(name="append", kind=Kind.DAMAGE, files=("a.safetensors",), what="")
    assert judge(base("z3-dp2-lion"), mutation, WHOLE, _trial())[0] is Label.MILD
    assert judge(base("z3-dp2-lion"), mutation, WHOLE, _trial(verify=ERROR))[0] is Label.NOTICED


def test_a_copy_that_changes_shapes_is_not_excused_by_missing_checksums() -> None:
    told = {"ab.safetensors without checksums"}
    before = {("parameter", "w"): "parameter [32, 16] None", ("state", "w", "weight"): "1"}
    after = {("parameter", "w"): "parameter [32, 8] None", ("state", "w", "weight"): "2"}
    truth = replace(WHOLE, atoms=replace(DONE, written=before))
    trial = _trial(atoms=replace(DONE, written=after, told=frozenset(told)))
    for name, expected in (("copy_shard", Label.SILENT), ("flip", Label.DOCUMENTED)):
        mutation = Mutation(name=name, kind=Kind.DAMAGE, files=("ab.safetensors",), what="")
        assert judge(base("llama"), mutation, truth, replace(trial, diff=ERROR_DIFF))[0] is expected
