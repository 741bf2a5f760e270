"""Objects that repeat in a pickle: what was carried out before is recognised by its bytes from then on.

The index of a distributed checkpoint describes hundreds of thousands of tensors by objects of a handful of classes,
each of them the same few dozen instructions with other numbers in them. The instructions of one such object are gone
through once (`ucp.io.pickle.trace`); they become a regular expression and a recipe.

Of the entries that these instructions put in the memo only texts are kept; the others are counted. A pickle that
refers to one of them later is read anew without recognition (`ucp.io.pickle.unpickle`).
"""

from __future__ import annotations

from ucp.core.pickle_values import GlobalName
from ucp.io.pickle.recipes import Known
from ucp.io.pickle.trace import NotRepeatedError, Repeat, repeat_of

__all__ = ["Repeats"]

_MET_BEFORE = 8
"""Objects of a class before one is learned from: a pickle of few objects is read faster as it is."""
_MOST_KINDS = 4
"""Kinds of objects of one class; others are read instruction by instruction."""
_MOST_TRIES = 16
"""Objects of one class that are tried."""
_MOST_NBYTES = 1024
"""Bytes of the instructions of one object."""


class _Class:
    """What is known of the objects of one class."""

    __slots__ = ("kinds", "made_by", "met", "tries")

    def __init__(self, made_by: GlobalName) -> None:
        self.made_by = made_by
        """Its name; held, so that no other name comes to have its identity."""
        self.kinds: list[Repeat] = []
        """Kinds, the one met last first."""
        self.met = 0
        """Objects that were of none of them."""
        self.tries = 0


class Repeats:
    """Kinds of objects met so far in one pickle."""

    __slots__ = ("_classes", "_known", "memoized")

    def __init__(self, memo: dict[int, object]) -> None:
        self._known = Known(memo)
        self._classes: dict[int, _Class] = {}
        """By the identity of the name of the class, of which a pickle has one object: it need not be hashed."""
        self.memoized = 0
        """Entries of the memo that were counted and not kept."""

    def read(self, made_by: GlobalName, data: bytes, at: int) -> tuple[object, int] | None:
        """The object of class `made_by` whose instructions begin at byte `at`, after the name, and where they end."""
        known = self._classes.get(id(made_by))
        if known is None:
            return None
        kinds, memo = known.kinds, self._known.memo
        for number, (pattern, make, memoized, texts) in enumerate(kinds):
            match = pattern.match(data, at)
            if match is None:
                continue
            groups = match.groups()
            try:
                made = make(groups)
            except (KeyError, UnicodeError):  # a reference to what was not kept, or damage: told by who reads it next
                return None
            if number:
                kinds.insert(0, kinds.pop(number))
            if texts:
                start = len(memo) + self.memoized
                for entry, group in texts:
                    memo[start + entry] = self._known.texts[groups[group]]
            self.memoized += memoized - len(texts)
            return made, match.end()
        return None

    def wants(self, made_by: GlobalName) -> bool:
        """Count one more object of class `made_by`; whether its instructions are worth learning from."""
        known = self._classes.get(id(made_by))
        if known is None:
            known = self._classes[id(made_by)] = _Class(made_by)
        known.met += 1
        return known.met > _MET_BEFORE and known.tries < _MOST_TRIES

    def learn(self, made_by: GlobalName, instructions: bytes, memoized: int) -> None:
        """Learn from the instructions of an object of class `made_by`; `memoized`: entries of the memo before them."""
        known = self._classes[id(made_by)]
        known.tries += 1
        if len(known.kinds) < _MOST_KINDS and len(instructions) <= _MOST_NBYTES:
            try:
                known.kinds.insert(0, repeat_of(made_by, instructions, known=self._known, memoized=memoized))
            except NotRepeatedError:
                return
