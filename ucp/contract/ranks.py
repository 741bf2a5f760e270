"""Files of several ranks: what they must agree on, and what each rank saved for itself.

Values are compared without reading tensor bytes: tensors by the checksums that their files recorded.

>>> Checksums(()).is_same({"lr": [0.1, float("nan")]}, {"lr": [0.1, float("nan")]})
True
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from ucp.core.index import Extra
from ucp.core.tensor import Record, TensorRef
from ucp.errors import MalformedError, MissingFileError, UnsupportedError, listed
from ucp.io.pickle.fields import described
from ucp.io.pickle.values import diff, equal_leaves


class Checksums:
    """Recorded checksums of the storages of many files."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._by_path: dict[str, list[Record]] = {}
        for record in records:
            self._by_path.setdefault(record.path, []).append(record)
        for own in self._by_path.values():
            own.sort(key=attrgetter("offset"))

    def find_storage(self, ref: TensorRef) -> Record | None:
        """The storage that a tensor lies in, where the file recorded one."""
        own = self._by_path.get(ref.path, ())
        at = bisect_right(own, ref.offset, key=attrgetter("offset"))
        found = own[at - 1] if at else None
        return found if found is not None and ref.offset + ref.extent <= found.offset + found.nbytes else None

    def has_same_bytes(self, a: TensorRef, b: TensorRef) -> bool | None:
        """Whether two tensors hold the same bytes; None where the files do not tell."""
        if (a.dtype, a.shape, a.strides) != (b.dtype, b.shape, b.strides):
            return False
        if a.numel == 0 or (a.path, a.offset) == (b.path, b.offset):
            return True
        mine, other = self.find_storage(a), self.find_storage(b)
        if mine is None or other is None:
            return None
        whole = a.offset - mine.offset == b.offset - other.offset and mine.nbytes == other.nbytes
        if whole and mine.crc32 == other.crc32:
            return True
        return False if whole and a.extent == mine.nbytes else None

    def is_same(self, a: object, b: object) -> bool:
        """Whether two values are known to be the same."""

        def same(one: object, other: object) -> bool:
            if isinstance(one, TensorRef) and isinstance(other, TensorRef):
                return self.has_same_bytes(one, other) is True
            return equal_leaves(one, other)

        return not any(True for _ in diff(a, b, same))

    def find_first_same(self, values: Iterable[object]) -> list[int]:
        """For each value the position of the first that is known to be the same.

        >>> Checksums(()).find_first_same(["a", "b", "a"])
        [0, 1, 0]
        """
        firsts: dict[int, object] = {}
        found = []
        for at, value in enumerate(values):
            found.append(next((first for first, own in firsts.items() if self.is_same(own, value)), at))
            firsts.setdefault(found[-1], value)
        return found


def make_rank_extras(name: str, values: Mapping[int, object], checksums: Checksums) -> list[Extra]:
    """Extras for what every rank of `values` (rank to value) saved under `name`.

    The first rank's value stands for all; a rank whose value differs has an extra of its own. Dicts are compared key
    by key: such an extra holds only the keys that differ, and a key that some ranks lack is kept for those with it.
    """
    first, common = next(iter(values.items()))
    if isinstance(common, dict) and all(isinstance(value, dict) for value in values.values()):
        dicts = {rank: value for rank, value in values.items() if isinstance(value, dict)}
        shared = {key: value for key, value in common.items() if all(key in own for own in dicts.values())}
        extras = [Extra(name=name, value=shared)] if shared or not common else []
        for rank, own in dicts.items():
            if checksums.is_same(own, shared):  # what its values share is then looked into once
                continue
            apart = {k: v for k, v in own.items() if k not in shared or not checksums.is_same(v, shared[k])}
            extras += [Extra(name=name, value=apart, rank=rank)] if apart else []
        return extras
    extras = [Extra(name=name, value=common)]
    others = ((rank, value) for rank, value in values.items() if rank != first)
    return extras + [Extra(name=name, value=v, rank=rank) for rank, v in others if not checksums.is_same(v, common)]


@dataclass(slots=True)
class Problems:
    """Problems found so far."""

    missing: list[str] = field(default_factory=list)
    """Files that are not there."""
    wrong: list[str] = field(default_factory=list)
    """Files that are damaged, from another run, or contradict one another."""
    unsupported: list[str] = field(default_factory=list)
    """Files that are well and not readable here."""

    def check_agreement(self, what: str, values: Mapping[str, object]) -> None:
        """Note it when `values` (file name to value) are not all equal; files that have None do not count."""
        known = {file: value for file, value in values.items() if value is not None}
        firsts = Checksums(()).find_first_same(known.values())
        if len(set(firsts)) <= 1:
            return
        usual = Counter(firsts).most_common(1)[0][0]
        elsewhere = described(list(known.values())[usual])
        for (file, value), first in zip(known.items(), firsts, strict=True):
            if first != usual:
                self.wrong.append(f"{file}: of another run: {what} is {described(value)}, elsewhere {elsewhere}")

    def extend(self, others: Problems) -> None:
        """Add those of another."""
        self.missing += others.missing
        self.wrong += others.wrong
        self.unsupported += others.unsupported

    def raise_any(self, where: str, what: str) -> None:
        """Raise one error with all problems, if there are any.

        `where`: the folder; `what`: the checkpoint in a few words, e.g. "ZeRO-3 over 4 ranks".
        """
        found = [*(f"missing: {line}" for line in self.missing), *self.wrong, *self.unsupported]
        if not found:
            return
        kind = MalformedError if self.wrong else MissingFileError if self.missing else UnsupportedError
        remedy = []
        if self.missing or self.wrong:
            remedy.append(
                "copy what is missing or damaged again from where it was saved, or wait, if the run is still saving"
            )
        if any("another run" in line or "extra" in line for line in self.wrong):
            remedy.append("remove files that belong to another run")
        count = f"{len(found)} problem{'s' if len(found) > 1 else ''}"
        advice = f"\n{'; '.join(remedy)}".replace("\nc", "\nC") if remedy else ""
        raise kind(f"{count} with the files of {where} ({what}):\n{listed(found, most=40)}{advice}")
