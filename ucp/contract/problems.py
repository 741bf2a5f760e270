"""Everything wrong with the files of a checkpoint, gathered so that one error tells it all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ucp.contract.rank_extras import Checksums
from ucp.errors import MalformedError, MissingFileError, UnsupportedError, listed
from ucp.io.pickle.fields import described


@dataclass(slots=True)
class Problems:
    """Problems found so far."""

    missing: list[str] = field(default_factory=list)
    """Files that are not there."""
    wrong: list[str] = field(default_factory=list)
    """Files that are damaged, from another run, or contradict one another."""
    unsupported: list[str] = field(default_factory=list)
    """Files that are well and not readable here."""

    def agree(self, what: str, values: Mapping[str, object]) -> None:
        """Note it when `values` (file name to value) are not all equal; files that have None do not count."""
        known = {file: value for file, value in values.items() if value is not None}
        firsts = Checksums(()).first_same(known.values())
        if len(set(firsts)) <= 1:
            return
        usual = Counter(firsts).most_common(1)[0][0]
        elsewhere = described(list(known.values())[usual])
        for (file, value), first in zip(known.items(), firsts, strict=True):
            if first != usual:
                self.wrong.append(f"{file}: of another run: {what} is {described(value)}, elsewhere {elsewhere}")

    def add(self, others: Problems) -> None:
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
