"""A checkpoint of any format, seen as atoms: what `ucp.open` gives.

checkpoint = ucp.open("ckpt")
list(checkpoint)                                # names of parameters and buffers
checkpoint["l1.weight"].states                  # ('weight', 'step', 'exp_avg', 'exp_avg_sq')
checkpoint.read("l1.weight")                    # the weight as one torch tensor, whatever the sharding was
checkpoint.read("l1.weight", "exp_avg")         # another state of it
model.load_state_dict(checkpoint.state_dict())  # all weights, tied names included
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from types import EllipsisType
from typing import TYPE_CHECKING

from ucp.core.index import WEIGHT, AtomIndex, Index, SourceFile, StateIndex
from ucp.core.region import Box, RegionPair
from ucp.core.slices import Locator, resolve
from ucp.core.target import Slice
from ucp.core.tensor import InlineTensor, TensorRef
from ucp.core.text.page import Page, Report, table
from ucp.core.text.units import shape_text
from ucp.core.topology import Topology
from ucp.errors import MissingLibraryError, NoSuchNameError, UsageError, format_count
from ucp.io.files import Sources
from ucp.live.resume.values import load_extra
from ucp.transfer.gather import Gatherer

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, repr=False)
class Atom:
    """One parameter of a checkpoint: its global tensor, and those of its states."""

    index: AtomIndex
    """Where its fragments lie."""

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
            raise NoSuchNameError(_describe_no_state(self.index, state))
        dtype: torch.dtype = getattr(torch, self.index.states[state].dtype.value)
        return dtype


def _need_torch() -> None:
    if find_spec("torch") is None:
        raise MissingLibraryError(
            "expected torch, as tensors are read into its own; it is not installed. Install it as for training (or "
            "pip install 'universal-checkpoint[torch]'); converting, verifying and comparing need none"
        )


def _describe_no_state(atom: AtomIndex, state: str) -> str:
    return f"{atom.name} has no state {state!r}; it has {', '.join(atom.states) or 'none'}"


def _describe_unknown(index: Index, name: str) -> str:
    """A message that no atom has this name, with what there is instead."""
    message = f"no parameter {name!r} in {index.path}"
    if name in index.aliases:
        return f"{message}: it is tied to {index.aliases[name]!r}, which holds it"
    near = get_close_matches(name, (*index.atoms, *index.aliases), 3) if isinstance(name, str) else []
    hint = (
        f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has {format_count(len(index.atoms), 'name')}"
    )
    return f"{message}; {hint} (iterate over the checkpoint for all)"


class _Extras(dict[str, object]):
    def __missing__(self, name: str) -> object:
        raise NoSuchNameError(f"no extra {name!r}; there are {', '.join(self) or 'none'}")


Region = Box | slice | tuple[slice | EllipsisType, ...]
"""Part of a tensor: a half-open box, or slices as in numpy (steps of 1)."""


@dataclass(frozen=True, slots=True, repr=False)
class Checkpoint(Report, Mapping[str, Atom]):
    """A checkpoint of any format as a mapping of names to atoms. Opening reads indexes only.

    The names are those of parameters and buffers, in the order of the model; a tied name is not one of them, but
    `read` and `state_dict` know it.
    """

    index: Index
    """What the files say, without their tensors."""

    def __repr__(self) -> str:
        return repr(self.index)

    def __getitem__(self, name: str) -> Atom:
        if name not in self.index.atoms:
            raise NoSuchNameError(_describe_unknown(self.index, name))
        return Atom(self.index.atoms[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.index.atoms)

    def __len__(self) -> int:
        return len(self.index.atoms)

    def page(self) -> Page:
        """What it is, and its parameters."""
        rows = [
            (
                name,
                shape_text(atom.global_shape),
                ", ".join(atom.states),
                ", ".join(dict.fromkeys(state.dtype for state in atom.states.values())),
            )
            for name, atom in self.index.atoms.items()
        ]
        columns = ("name", "shape", "states", "dtypes")
        parameters = table("Parameters", columns, rows, most=_SHOWN, all_in="iterate over the checkpoint to see all")
        return (*self.index.page(), parameters)

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
        """Name to value of what is not a tensor of a parameter, if it is the same on all ranks.

        Plain values are themselves; objects are inert (`ucp.io.pickle.values.Stub`), tensors are references,
        which `extra` and `tensor` read.
        """
        return _Extras({extra.name: extra.value for extra in self.index.extras if extra.rank is None})

    @property
    def atoms(self) -> Mapping[str, Atom]:
        """The same mapping, for code that names what it iterates over."""
        return self

    def read(self, name: str, state: str = WEIGHT, region: Region | None = None) -> torch.Tensor:
        """Elements of a state as a tensor of its own shape, or of the shape of `region`.

        `name` may be a tied name. `region`: of the global tensor, in elements, e.g. `ucp.Box((0, 0), (4, 8))` or
        `numpy.s_[:4, :8]`. Raises KeyError for a name or state that is not there, ValueError for a region outside,
        MissingLibraryError without torch.
        """
        source = self._state(name, state)
        box = _to_box(region, source.global_shape, f"{name}/{state}")
        return _read(source, box, f"{name}/{state}", self.index.files)

    def state_dict(self, state: str = WEIGHT) -> dict[str, torch.Tensor]:
        """Name to tensor of one state of all parameters and buffers that have it, as a model loads them.

        Tied names are included, and share the tensor that they are tied to. Raises KeyError for a state that nothing
        has, MissingLibraryError without torch.
        """
        tensors = {name: self.read(name, state) for name, atom in self.items() if state in atom.states}
        if not tensors and self:
            states = dict.fromkeys(name for atom in self.values() for name in atom.states)
            raise NoSuchNameError(f"no parameter has a state {state!r}; the states are {', '.join(states)}")
        ties = {name: tensors[stored] for name, stored in self.index.aliases.items() if stored in tensors}
        return {**tensors, **ties}

    def extra(self, name: str, rank: int | None = None) -> object:
        """The value of an extra with its tensors read, as a training script uses it.

        `rank`: whose value, if ranks differ. Arrays of numpy and counters are built; objects of other classes stay
        inert. A companion file is read if torch or JSON wrote it: `extra("companion/scheduler.pt")`.

        Raises KeyError with the names there are, MalformedError for a damaged file, MissingLibraryError without torch.
        """
        extras = self.index.extras
        by_rank = {extra.rank: extra for extra in reversed(extras) if extra.name == name}
        if rank in by_rank:
            return load_extra(by_rank[rank], self.tensor)
        if by_rank:
            ranks = ", ".join(str(extra.rank) for extra in extras if extra.name == name)
            raise NoSuchNameError(f"no extra {name!r} of rank {rank}; it is of rank {ranks}")
        names = ", ".join(dict.fromkeys(extra.name for extra in extras)) or "none"
        raise NoSuchNameError(f"no extra {name!r}; there are {names}")

    def tensor(self, ref: TensorRef | InlineTensor) -> torch.Tensor:
        """The tensor that an extra refers to, e.g. a random state.

        Raises UsageError for anything but a reference, MissingLibraryError without torch.
        """
        if not isinstance(ref, TensorRef | InlineTensor):
            raise UsageError(f"expected a TensorRef out of `.extras`; got {type(ref).__name__}, which is no tensor")
        return _read(StateIndex.from_tensor(ref), Box.full(ref.shape), "an extra", self.index.files)

    def _state(self, name: str, state: str) -> StateIndex:
        """Raises NoSuchNameError with what there is instead."""
        stored = self.index.aliases.get(name, name)
        if stored not in self.index.atoms:
            raise NoSuchNameError(_describe_unknown(self.index, name))
        states = self.index.atoms[stored].states
        if state not in states:
            raise NoSuchNameError(_describe_no_state(self.index.atoms[stored], state))
        return states[state]


_SHOWN = 50
"""Parameters on the page of a checkpoint."""


def _to_box(region: Region | None, shape: tuple[int, ...], what: str) -> Box:
    """A region as a box. Raises ValueError if it does not lie in a tensor of that shape."""
    if region is None:
        return Box.full(shape)
    if isinstance(region, Box):
        if len(region.sizes) != len(shape) or any(a > b for a, b in zip(region.stops, shape, strict=True)):
            raise ValueError(f"region {region} does not lie in {what} of shape {list(shape)}")
        return region
    items = region if isinstance(region, tuple) else (region,)
    if Ellipsis in items:
        position = items.index(Ellipsis)
        missing = len(shape) - len(items) + 1
        items = (*items[:position], *[slice(None)] * missing, *items[position + 1 :])
    slices = [item for item in items if isinstance(item, slice)]
    if len(slices) != len(items) or len(items) > len(shape) or any(item.step not in {None, 1} for item in slices):
        raise ValueError(f"expected at most {len(shape)} slices with steps of 1 for {what}; got {region!r}")
    slices += [slice(None)] * (len(shape) - len(slices))
    bounds = [item.indices(length)[:2] for item, length in zip(slices, shape, strict=True)]
    return Box(tuple(low for low, _ in bounds), tuple(max(high - low, 0) for low, high in bounds))


def _read(source: StateIndex, box: Box, what: str, files: Sequence[SourceFile]) -> torch.Tensor:
    """The elements of a box as a tensor."""
    _need_torch()
    import torch

    piece = Slice(
        param=what,
        state="",
        dtype=source.dtype,
        pairs=(RegionPair(box, Box.full(box.sizes)),),
        local_shape=box.sizes,
        start=0,
        stop=box.numel,
    )
    tensor = torch.empty(box.sizes, dtype=getattr(torch, source.dtype.value))
    if box.numel:
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        gatherer = Gatherer(sources=Sources(files))
        gatherer.fill(data, source.dtype, resolve(piece, Locator(source), 0, box.numel))
        gatherer.sources.close()
    return tensor
