"""What was found while a live run was matched with a checkpoint."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ucp.errors import LoadError, counted, listed


@dataclass(slots=True)
class Findings:
    """What was found while matching; each list is one kind of thing, one line each."""

    missing: list[str] = field(default_factory=list)
    """Tensors of the model that the checkpoint lacks."""
    unexpected: list[str] = field(default_factory=list)
    """Atoms of the checkpoint that the model lacks."""
    problems: list[str] = field(default_factory=list)
    """Whatever else does not fit."""
    hints: list[str] = field(default_factory=list)
    """What may cure it."""
    notes: list[str] = field(default_factory=list)
    """What is right, and worth knowing."""
    casts: Counter[str] = field(default_factory=Counter)
    """Changes of dtype, and how many tensors each concerns."""

    def check(self, path: str) -> None:
        """Raise one LoadError that lists everything that does not fit."""
        if text := self._text():
            cure = "; ".join([*self.hints, "strict=False loads what fits and reports the rest"])
            raise LoadError(f"the model and the checkpoint {path} do not fit, nothing was loaded:\n{text}\n{cure}")

    def make_no_match_error(self, path: str) -> LoadError:
        """The error for a checkpoint of which not one tensor goes into the model."""
        what = "fits the model" if self.problems else "has a name of the model"
        cure = self.hints or ["`ucp inspect` lists the names and shapes there"]
        return LoadError(f"nothing in {path} {what}, nothing was loaded:\n{self._text()}\n{'; '.join(cure)}")

    def _text(self) -> str:
        """Everything that does not fit, kind by kind."""
        kinds = (
            ("tensor of the model is not", "tensors of the model are not", " in the checkpoint", self.missing),
            ("tensor of the checkpoint is not", "tensors of the checkpoint are not", " in the model", self.unexpected),
            ("thing does not fit", "things do not fit", "", self.problems),
        )
        every = (f"{counted(len(n), one, many)}{where}:\n{listed(n)}" for one, many, where, n in kinds if n)
        return "\n".join(every)
