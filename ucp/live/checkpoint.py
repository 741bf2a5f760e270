"""A checkpoint of any format, seen as atoms: what `ucp.open` gives.

checkpoint = ucp.open("ckpt")
checkpoint.atoms["l1.weight"].states            # ('weight', 'step', 'exp_avg', 'exp_avg_sq')
checkpoint.read("l1.weight", "exp_avg")         # one torch tensor, whatever the sharding was
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ucp.core.index import AtomIndex, Index, StateIndex
from ucp.core.region import Box, RegionPair
from ucp.core.slices import Locator, Slice, resolve
from ucp.core.topology import Topology
from ucp.errors import MissingLibraryError, NoSuchNameError, counted
from ucp.transfer.gather import Gatherer, Sources

if TYPE_CHECKING:
    import torch

__all__ = ["Atom", "Checkpoint"]


@dataclass(frozen=True, slots=True, repr=False)
class Atom:
    """One parameter of a checkpoint as a whole."""

    index: AtomIndex
    """Where its pieces lie."""

    def __repr__(self) -> str:
        states = ", ".join(f"{name} {state.dtype}" for name, state in self.index.states.items())
        return f"<{self.index.kind} {self.index.name} {list(self.global_shape)}: {states}>"

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Elements per dim."""
        return self.index.global_shape

    @property
    def states(self) -> tuple[str, ...]:
        """Names of its states, `weight` first."""
        return tuple(self.index.states)

    def dtype(self, state: str) -> torch.dtype:
        """Type of a state, as a torch dtype. Raises KeyError with the states there are, MissingLibraryError."""
        _need_torch()
        import torch

        if state not in self.index.states:
            raise NoSuchNameError(_no_state(self.index, state))
        found: torch.dtype = getattr(torch, self.index.states[state].dtype.value)
        return found


def _need_torch() -> None:
    if find_spec("torch") is None:
        raise MissingLibraryError(
            "expected torch, as tensors are read into its own; it is not installed. Install it as for training (or "
            "pip install 'universal-checkpoint[torch]'); converting, verifying and comparing need none"
        )


def _no_state(atom: AtomIndex, state: str) -> str:
    return f"{atom.name} has no state {state!r}; it has {', '.join(atom.states) or 'none'}"


def _unknown(index: Index, name: str) -> str:
    """That there is no atom of that name, and what there is instead."""
    said = f"no parameter {name!r} in {index.path}"
    if name in index.aliases:
        return f"{said}: it is tied to {index.aliases[name]!r}, which holds it"
    near = get_close_matches(name, (*index.atoms, *index.aliases), 3) if isinstance(name, str) else []
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has {counted(len(index.atoms), 'name')}"
    return f"{said}; {hint} (`.atoms` lists all)"


class _Atoms(Mapping[str, Atom]):
    def __init__(self, index: Index) -> None:
        self._index = index

    def __getitem__(self, name: str) -> Atom:
        if name not in self._index.atoms:
            raise NoSuchNameError(_unknown(self._index, name))
        return Atom(self._index.atoms[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._index.atoms)

    def __len__(self) -> int:
        return len(self._index.atoms)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint of any format, seen as atoms. Opening reads indexes only."""

    index: Index
    """Everything that is known of it."""

    @property
    def format(self) -> str:
        """Name of its format."""
        return self.index.format

    @property
    def topology(self) -> Topology:
        """Layout of the run that wrote it."""
        return self.index.topology

    @property
    def step(self) -> int | None:
        """Training step, where recorded."""
        return self.index.step

    @property
    def extras(self) -> Mapping[str, object]:
        """Name to value of what is not a tensor of a parameter, as far as it is the same on all ranks.

        Plain values are themselves; objects are inert (`ucp.core.pickle_values.Stub`), tensors are references
        (`ucp.core.tensor.TensorRef`).
        """
        return {extra.name: extra.value for extra in self.index.extras if extra.rank is None}

    @property
    def atoms(self) -> Mapping[str, Atom]:
        """Name to atom, in the order of the model."""
        return _Atoms(self.index)

    def read(self, name: str, state: str, region: Box | None = None) -> torch.Tensor:
        """Elements of a state as a tensor of its own shape, or of the shape of `region`.

        `name` may be a tied name. `region`: half-open box of the whole, elements. Raises KeyError for a name or state
        that is not there, ValueError for a region outside, MissingLibraryError without torch.
        """
        _need_torch()
        import torch

        source = self._state(name, state)
        box = region or Box.whole(source.global_shape)
        whole = Box.whole(source.global_shape)
        if len(box.sizes) != len(whole.sizes) or any(a > b for a, b in zip(box.stops, whole.stops, strict=True)):
            raise ValueError(f"region {box} does not lie in {name}/{state} of shape {list(source.global_shape)}")
        own = Slice(
            param=name,
            state=state,
            dtype=source.dtype,
            pairs=(RegionPair(box, Box.whole(box.sizes)),),
            local_shape=box.sizes,
            start=0,
            stop=box.numel,
        )
        tensor = torch.empty(box.sizes, dtype=getattr(torch, source.dtype.value))
        if box.numel:
            data = tensor.reshape(-1).view(torch.uint8).numpy().data
            gatherer = Gatherer(sources=Sources())
            gatherer.fill(data, source.dtype, resolve(own, Locator(source), 0, box.numel))
            gatherer.sources.close()
        return tensor

    def _state(self, name: str, state: str) -> StateIndex:
        """Raises KeyError with what there is instead."""
        stored = self.index.aliases.get(name, name)
        if stored not in self.index.atoms:
            raise NoSuchNameError(_unknown(self.index, name))
        states = self.index.atoms[stored].states
        if state not in states:
            raise NoSuchNameError(_no_state(self.index.atoms[stored], state))
        return states[state]
