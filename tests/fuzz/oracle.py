"""What the verbs made of a checkpoint that was changed, and whether they may.

Allowed is to refuse with a message, to give the same bits as before, to say what was lost, and to take an edit for what
it says. Not allowed is everything else; only what docs/explanation/limits.md lists may pass without a word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import xxhash

from tests.fuzz.bases import Base
from tests.fuzz.mutations import Kind, Mutation


class Label(StrEnum):
    """Class of an outcome."""

    REFUSED = "refused"
    NOTICED = "noticed by verify"
    """What was lost is of no use to atoms; `verify` says it."""
    SAME = "same bits"
    SAID = "lost, and said"
    CARRIED = "edit carried"
    """The new value is in the atoms, and all verbs agree on it."""
    DOCUMENTED = "documented"
    """Silent, and listed in docs/explanation/limits.md."""
    SILENT = "SILENT"
    MILD = "VERIFY TOO MILD"
    """`verify` calls it whole, and `convert` refuses it."""
    CONTRADICTION = "CONTRADICTION"
    WRONG_REFUSAL = "WRONG REFUSAL"
    LEFTOVER = "LEFTOVER"
    """The source was written to, or a refused conversion left a destination."""
    MUTE = "MUTE"
    """Failed without a message, or with another exit code than those documented."""
    TRACEBACK = "TRACEBACK"
    HANG = "HANG"
    MEMORY = "MEMORY"


ALLOWED = frozenset(
    {Label.REFUSED, Label.NOTICED, Label.SAME, Label.SAID, Label.CARRIED, Label.DOCUMENTED},
)

Contents = Mapping[tuple[str, ...], str]
"""What is in a store of atoms, ("state", parameter, state), ("group", parameter), ("extra", name), ..., to a digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What one verb did."""

    verb: str
    code: int = 0
    text: str = ""
    failure: tuple[Label, str] | None = None
    """How it failed, if not in one of the ways it should, and where."""
    told: frozenset[str] = frozenset()
    """Lines of warnings, notes, casts and losses, of a conversion."""
    written: Contents = field(default_factory=dict)
    """Atoms that were written, or that are in what was written."""
    tree: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """All verbs on one checkpoint."""

    inspect: Attempt
    plan: Attempt
    verify: Attempt
    diff: Attempt
    read: Attempt
    atoms: Attempt
    target: Attempt
    against: Attempt | None = None
    """`verify` of the atoms written against the checkpoint; where they are not those of the undamaged one."""
    leftover: str = ""

    def attempts(self) -> Iterable[Attempt]:
        """All of them."""
        several = (self.inspect, self.plan, self.verify, self.diff, self.read, self.atoms, self.target, self.against)
        return (own for own in several if own is not None)


def contents(store: Path) -> Contents:
    """What a store of atoms holds, without where it came from and how it lies in files."""
    document = json.loads((store / "ucp.json").read_bytes())
    found: dict[tuple[str, ...], str] = {("step",): repr(document["step"])}
    for name, atom in document["atoms"].items():
        found["parameter", name] = f"{atom['kind']} {atom['shape']} {atom.get('model_dtype')}"
        found["iteration", name] = f"{atom.get('iteration')} {atom.get('cast')}"
        for state, own in atom["states"].items():
            value = own["xxh3"] if "xxh3" in own else [piece[-1] for piece in own["pieces"]]
            found["state", name, state] = f"{own['dtype']} {own['shape']} {value}"
    for number, group in enumerate(document["groups"]):
        for name in group["params"]:
            found["group", name] = f"{number} {json.dumps(group['hyper'], sort_keys=True)}"
    found |= {("alias", name): stored for name, stored in document["aliases"].items()}
    for extra in document["extras"]:
        rank = "" if extra["rank"] is None else str(extra["rank"])
        found["extra", extra["name"], rank] = _digest(store / extra["file"])
    return found


def tree(folder: Path) -> str:
    """Digest of all files of a folder, but of those that say where they came from."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("ucp"))
    lines = (f"{path.relative_to(folder)} {_digest(path)}\n" for path in files)
    return xxhash.xxh3_64_hexdigest("".join(lines).encode())


def _digest(path: Path) -> str:
    return xxhash.xxh3_64_hexdigest(path.read_bytes())


def judge(base: Base, mutation: Mutation, truth: Trial, trial: Trial) -> tuple[Label, str]:
    """The class of an outcome, and what it is seen by. `truth`: the verbs on the undamaged checkpoint."""
    failed = _failure(trial)
    if failed is not None:
        return failed
    if truth.atoms.code:  # of a kind that is not read: all that is asked is a message
        return (Label.REFUSED if trial.atoms.code else Label.CARRIED), _head(truth.atoms.text)
    if trial.atoms.code:
        return _judge_refusal(mutation, truth, trial)
    label, why = _judge_written(base, mutation, truth.atoms, trial.atoms)
    if label not in ALLOWED:
        return label, f"{why} (verify: {trial.verify.code})"
    refusing = [own for own in trial.attempts() if own.code and own.verb != "target"]
    if mutation.kind is Kind.HARMLESS and refusing:
        return Label.WRONG_REFUSAL, f"{refusing[0].verb}: {_head(refusing[0].text)}"
    contradiction = _contradiction(truth, trial)
    if contradiction:
        return Label.CONTRADICTION, contradiction
    if not trial.target.code and not truth.target.code and trial.target.tree != truth.target.tree:
        there, said = _judge_written(base, mutation, truth.target, trial.target)
        if there not in ALLOWED:
            return there, f"in the target: {said}"
    if label is Label.SAME and trial.verify.code:
        return Label.NOTICED, _head(trial.verify.text)
    return (Label.MILD, "read, though no other program reads the file") if mutation.needs_report else (label, why)


def judge_resumed(resumed: Attempt, verify: Attempt, *, is_equal: bool) -> tuple[Label, str]:
    """The same of a finished conversion that was damaged and resumed. `is_equal`: whether its files are as before."""
    for attempt in (resumed, verify):
        if attempt.failure is not None:
            return attempt.failure[0], f"{attempt.verb}: {attempt.failure[1]}"
    if resumed.code:
        is_said = resumed.code in (1, 2) and bool(resumed.text.strip())
        return (Label.REFUSED, _head(resumed.text)) if is_said else (Label.MUTE, f"ended with {resumed.code}")
    if is_equal and not verify.code:
        return Label.SAME, ""
    return Label.SILENT, f"complete, says --resume; verify: {_head(verify.text)}"


def _failure(trial: Trial) -> tuple[Label, str] | None:
    """How a verb failed in a way that none may."""
    for attempt in trial.attempts():
        if attempt.failure is not None:
            return attempt.failure[0], f"{attempt.verb}: {attempt.failure[1]}"
        if attempt.code not in (0, 1, 2, 3) or (attempt.code and not attempt.text.strip()):
            return Label.MUTE, f"{attempt.verb} ended with {attempt.code}"
    return (Label.LEFTOVER, trial.leftover) if trial.leftover else None


def _judge_refusal(mutation: Mutation, truth: Trial, trial: Trial) -> tuple[Label, str]:
    head = _head(trial.atoms.text)
    if mutation.kind is Kind.HARMLESS:
        return Label.WRONG_REFUSAL, head
    if not trial.target.code and trial.target.tree != truth.target.tree:
        return Label.CONTRADICTION, f"converted to the target, and not to atoms: {head}"
    if not trial.verify.code and mutation.kind is Kind.DAMAGE:
        return Label.MILD, head
    return Label.REFUSED, head


def _judge_written(base: Base, mutation: Mutation, truth: Attempt, found: Attempt) -> tuple[Label, str]:
    """What was written beside what should have been."""
    changed = [item for item, value in truth.written.items() if found.written.get(item) != value]
    changed = [item for item in changed if not _is_beside(item, mutation)]
    added = {item for item in found.written.keys() - truth.written.keys() if not _is_companion(item)}
    if not changed and not added:
        return Label.SAME, ""
    told = found.told - truth.told
    unsaid = [item for item in changed if not _is_said(item, told, changed)]
    shown = "; ".join(" ".join(item) for item in unsaid[:4]) + (f" and {len(unsaid) - 4} more" if unsaid[4:] else "")
    if not unsaid and changed:
        return Label.SAID, ""
    limit = _limit(base, mutation, truth, found, unsaid)
    if limit:
        return Label.DOCUMENTED, limit
    if mutation.kind is Kind.EDIT:
        values = {found.written[item] for item in added}
        gone = [item for item in unsaid if item not in found.written and truth.written[item] not in values]
        return (Label.SILENT, f"gone: {gone[:4]}") if gone else (Label.CARRIED, shown)
    return Label.SILENT, shown or f"added: {sorted(added)[:4]}"


def _is_companion(item: tuple[str, ...]) -> bool:
    """Whether it is a file that lay beside the checkpoint, which is carried along as it is."""
    return item[0] == "extra" and item[1].startswith("companion/")


def _is_beside(item: tuple[str, ...], mutation: Mutation) -> bool:
    """Whether it is such a file, and that one was changed: nothing tells what it was."""
    return _is_companion(item) and item[1].removeprefix("companion/") in mutation.files


def _is_said(item: tuple[str, ...], told: Iterable[str], changed: list[tuple[str, ...]]) -> bool:
    """Whether one of the lines names it, or is a long list cut short that names another."""
    if len(item) < 2:
        return any("step" in line for line in told)
    for line in told:
        if _names(line, item[1]) or (_is_cut(line) and any(_names(line, own[1]) for own in changed if len(own) > 1)):
            return True
    return False


def _is_cut(line: str) -> bool:
    return "more)" in line or ", ..." in line


def _names(line: str, name: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(name)}(?![\w])", line) is not None


def _limit(base: Base, mutation: Mutation, truth: Attempt, found: Attempt, unsaid: list[tuple[str, ...]]) -> str:
    """The row of docs/explanation/limits.md that lets this pass, in a word."""
    names = [Path(name).name for name in mutation.files]
    lost = {item[1] for item in unsaid if item[0] in ("state", "parameter", "group")}
    if lost and all(found.written.get(("parameter", name), "").startswith("frozen") for name in lost):
        return "a parameter whose states are all gone is named frozen"
    is_reshaped = mutation.name in _COPIED and any(item[0] == "parameter" for item in unsaid)
    if not is_reshaped and any(
        name in line for line in found.told - truth.told if "without checksums" in line for name in names if unsaid
    ):
        return "damage in a file that carries no checksums"
    if mutation.name == "flip_name" and base.format.startswith("megatron") and not _is_of_trained(unsaid, truth):
        return "a damaged name in a .metadata that records no paths"
    if mutation.name in ("foreign", "foreign_link"):
        return "a file or link of another run, of which no other file has a copy"
    if mutation.name == "swap_folders" and base.name.startswith("make_delta") and base.inner in mutation.files:
        return "versions exchanged, of which a full one does not record its number"
    is_whole = mutation.name == "swap_folders"
    folders = {name if is_whole else str(Path(name).parent) for name in mutation.files}
    if mutation.name in _MIXED and (is_whole or len(set(names)) == 1) and all(map(_IN_ZERO, folders)):
        return "files of a universal checkpoint, exchanged or copied between parameters"
    return ""


def _is_of_trained(items: list[tuple[str, ...]], truth: Attempt) -> bool:
    """Whether there are none, or one is of a parameter that was trained."""
    return not items or any(truth.written.get(("parameter", *item[1:2]), "").startswith("parameter") for item in items)


_MIXED = frozenset({"copy_shard", "swap", "swap_folders", "duplicate", "something_else"})
_COPIED = frozenset({"copy_shard", "duplicate"})
"""One file over another: where shapes differ then, the boxes of the files show it, whatever checksums there are."""
_IN_ZERO = re.compile(r".*/zero/[^/]+").fullmatch
"""Folder of a parameter in a universal checkpoint."""


def _contradiction(truth: Trial, trial: Trial) -> str:
    """What one verb says of a checkpoint that another one denies."""
    compared = [
        item
        for item in truth.atoms.written.keys() | trial.atoms.written.keys()
        if item[0] in ("state", "group", "alias") and truth.atoms.written.get(item) != trial.atoms.written.get(item)
    ]
    if trial.diff.code in (1, 2):
        return f"convert takes what diff refuses: {_head(trial.diff.text)}"
    if compared and not trial.diff.code:
        return f"diff says equal, though atoms differ: {sorted(compared)[:3]}"
    if not compared and trial.diff.code and truth.diff.code == 0:
        return f"diff says different, though atoms are equal: {_head(trial.diff.text)}"
    if trial.against is not None and trial.against.code and not trial.verify.code:
        return f"atoms are not equal to what they were made of: {_head(trial.against.text)}"
    if trial.inspect.code or trial.plan.code:
        own = trial.inspect if trial.inspect.code else trial.plan
        return f"convert takes what {own.verb} refuses: {_head(own.text)}"
    return ""


def _head(text: str) -> str:
    """The first lines of a message, on one line."""
    return " | ".join(line.strip() for line in text.strip().splitlines()[:3])[:300]


def lines_of(document: Mapping[str, Any]) -> frozenset[str]:
    """What a conversion says of itself (`ucp convert --json`)."""
    lines = [line for key in ("warnings", "casts", "notes", "dropped") for line in document[key]]
    return frozenset([*lines, *(f"{path} without checksums" for path in document["unchecked_files"])])
