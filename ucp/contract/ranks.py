"""Files of several ranks: values that must agree, and values that each rank saved separately.

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
from ucp.errors import MalformedError, MissingFileError, UnsupportedError, format_list
from ucp.io.pickle.fields import describe_value
from ucp.io.pickle.values import diff, equal_leaves


class Checksums:
    """Recorded checksums of the storages of many files."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._by_path: dict[str, list[Record]] = {}
        for record in records:
            self._by_path.setdefault(record.path, []).append(record)
        for records_of_path in self._by_path.values():
            records_of_path.sort(key=attrgetter("offset"))

    def find_storage(self, ref: TensorRef) -> Record | None:
        """Record of the storage that contains a tensor, if there is one."""
        records = self._by_path.get(ref.path, ())
        position = bisect_right(records, ref.offset, key=attrgetter("offset"))
        record = records[position - 1] if position else None
        return record if record is not None and ref.offset + ref.extent <= record.offset + record.nbytes else None

    def has_same_bytes(self, a: TensorRef, b: TensorRef) -> bool | None:
        """Whether two tensors hold the same bytes; None if the recorded checksums cannot tell."""
        if (a.dtype, a.shape, a.strides) != (b.dtype, b.shape, b.strides):
            return False
        if a.numel == 0 or (a.path, a.offset) == (b.path, b.offset):
            return True
        first_storage, second_storage = self.find_storage(a), self.find_storage(b)
        if first_storage is None or second_storage is None:
            return None
        is_aligned = (
            a.offset - first_storage.offset == b.offset - second_storage.offset
            and first_storage.nbytes == second_storage.nbytes
        )
        if is_aligned and first_storage.crc32 == second_storage.crc32:
            return True
        return False if is_aligned and a.extent == first_storage.nbytes else None

    def is_same(self, a: object, b: object) -> bool:
        """Whether two values are known to be equal."""

        def same(first: object, second: object) -> bool:
            if isinstance(first, TensorRef) and isinstance(second, TensorRef):
                return self.has_same_bytes(first, second) is True
            return equal_leaves(first, second)

        return not any(True for _ in diff(a, b, same))

    def find_first_same(self, values: Iterable[object]) -> list[int]:
        """For each value, the position of the first one that is known to be equal.

        >>> Checksums(()).find_first_same(["a", "b", "a"])
        [0, 1, 0]
        """
        firsts: dict[int, object] = {}
        positions = []
        for position, value in enumerate(values):
            positions.append(next((first for first, known in firsts.items() if self.is_same(known, value)), position))
            firsts.setdefault(positions[-1], value)
        return positions


def make_rank_extras(name: str, values: Mapping[int, object], checksums: Checksums) -> list[Extra]:
    """Extras for the values that ranks saved under `name`: the first rank's, and one per rank that differs from it.

    Dicts are compared key by key: the extra of a rank has only the keys that differ, or that some ranks lack.
    """
    first, common = next(iter(values.items()))
    if isinstance(common, dict) and all(isinstance(value, dict) for value in values.values()):
        dicts = {rank: value for rank, value in values.items() if isinstance(value, dict)}
        shared = {key: value for key, value in common.items() if all(key in entries for entries in dicts.values())}
        extras = [Extra(name=name, value=shared)] if shared or not common else []
        for rank, entries in dicts.items():
            if checksums.is_same(entries, shared):  # quicker than entry by entry
                continue
            differing = {k: v for k, v in entries.items() if k not in shared or not checksums.is_same(v, shared[k])}
            extras += [Extra(name=name, value=differing, rank=rank)] if differing else []
        return extras
    extras = [Extra(name=name, value=common)]
    others = ((rank, value) for rank, value in values.items() if rank != first)
    return extras + [Extra(name=name, value=v, rank=rank) for rank, v in others if not checksums.is_same(v, common)]


@dataclass(slots=True)
class Problems:
    """Everything wrong with the files of a checkpoint, collected for one error."""

    missing: list[str] = field(default_factory=list)
    """Missing files."""
    wrong: list[str] = field(default_factory=list)
    """Files that are damaged, from another run, or inconsistent."""
    unsupported: list[str] = field(default_factory=list)
    """Intact files that cannot be read here."""

    def check_agreement(self, what: str, values: Mapping[str, object]) -> None:
        """Add a problem for each file whose value differs from most. `values`: file to its value, None if unknown."""
        known = {file: value for file, value in values.items() if value is not None}
        firsts = Checksums(()).find_first_same(known.values())
        if len(set(firsts)) <= 1:
            return
        usual = Counter(firsts).most_common(1)[0][0]
        elsewhere = describe_value(list(known.values())[usual])
        for (file, value), first in zip(known.items(), firsts, strict=True):
            if first != usual:
                self.wrong.append(f"{file}: of another run: {what} is {describe_value(value)}, elsewhere {elsewhere}")

    def extend(self, others: Problems) -> None:
        """Add the problems of another collection."""
        self.missing += others.missing
        self.wrong += others.wrong
        self.unsupported += others.unsupported

    def raise_any(self, where: str, what: str) -> None:
        """Raise one error with all problems, if there are any. `what`: e.g. "ZeRO-3 over 4 ranks"."""
        lines = [*(f"missing: {line}" for line in self.missing), *self.wrong, *self.unsupported]
        if not lines:
            return
        kind = MalformedError if self.wrong else MissingFileError if self.missing else UnsupportedError
        remedy = []
        if self.missing or self.wrong:
            remedy.append(
                "copy what is missing or damaged again from where it was saved, or wait, if the run is still saving"
            )
        if any("another run" in line or "extra" in line for line in self.wrong):
            remedy.append("remove files that belong to another run")
        count = f"{len(lines)} problem{'s' if len(lines) > 1 else ''}"
        advice = f"\n{'; '.join(remedy)}".replace("\nc", "\nC") if remedy else ""
        raise kind(f"{count} with the files of {where} ({what}):\n{format_list(lines, most=40)}{advice}")
