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
from tests.fuzz.mutations import Kind, Mutation, Place, mutate
from tests.fuzz.oracle import Attempt, Label, Trial, judge, tree
from tests.fuzz.trial import Fuzzer

ROOT = Path(__file__).parents[2]
SLICE = ("z2-dp4-bf16*", "z3-dp2-lion", "z1-dp2-fp16*")


def base(name: str) -> Base:
    return next(own for own in BASES if own.name == name)


def test_a_slice_of_the_fuzz() -> None:
    words = ["--seed", "0", "--count", "12", "--seconds", "600", "--jobs", "1"]
    for name in SLICE:
        words += ["--base", name]
    command = [sys.executable, "-m", "tests.fuzz", *words]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 mutations" in done.stdout


def test_a_seed_gives_the_same_mutations(tmp_path: Path) -> None:
    digests, ways = set(), set()
    for number in range(30):
        for again in range(2):
            path = base("z2-dp4-bf16.packed").make(tmp_path / f"{number}-{again}", base("z1-dp2-fp16").fixture)
            own = mutate(Place(root=path, others=(base("z3-dp2-fp16").fixture,), is_store=False), Random(number))
            ways.add(own.name)
            if own.name not in ("something_else", "lengthen"):  # pipes and 20 GiB
                digests.add((number, own.what, tree(path)))
    assert len(ways) > 8
    assert len({number for number, _, _ in digests}) == len(digests)


def test_a_checksum_that_nobody_compares_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(place: Place, rng: Random) -> Mutation:
        pack = place.root / "packs" / "00000.safetensors"
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 1
        pack.write_bytes(data)
        return Mutation(name="flip", kind=Kind.DAMAGE, files=(str(pack),), what="a byte of a tensor")

    monkeypatch.setattr("tests.fuzz.trial.mutate", damage)
    fuzzer = Fuzzer(tmp_path, 0, (base("z2-dp4-bf16.packed"),))
    assert fuzzer.run(0)[1] is Label.REFUSED
    monkeypatch.setattr(sys.modules["ucp.conversion.execute"], "mismatches", lambda *_: [])
    assert fuzzer.run(0)[1] is Label.SILENT


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
