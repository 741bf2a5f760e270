"""A checkpoint of any format as a mapping from names to global tensors: what `ucp.open` returns.

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
    """One parameter or buffer of a checkpoint: the global tensors of its weight and its optimizer states."""

    index: AtomIndex
    """Its states, and where their fragments are in the files."""

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
        """Dtype of a state, as a torch dtype. Raises KeyError, which lists the states, MissingLibraryError."""
        _need_torch()
        import torch

        if state not in self.index.states:
            raise NoSuchNameError(_describe_no_state(self.index, state))
        dtype: torch.dtype = getattr(torch, self.index.states[state].dtype.value)
        return dtype


def _need_torch() -> None:
    if find_spec("torch") is None:
        raise MissingLibraryError(
            "expected torch, which reading a tensor needs; it is not installed. Install it as for training, or with "
            "pip install 'universal-checkpoint[torch]'. Converting, verifying and comparing work without torch"
        )


def _describe_no_state(atom: AtomIndex, state: str) -> str:
    return f"{atom.name} has no state {state!r}; it has {', '.join(atom.states) or 'none'}"


def _describe_unknown(index: Index, name: str) -> str:
    """A message that no atom has this name, with similar names."""
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
"""Part of a tensor: a half-open box, or slices as in NumPy (with steps of 1)."""


@dataclass(frozen=True, slots=True, repr=False)
class Checkpoint(Report, Mapping[str, Atom]):
    """A checkpoint of any format as a mapping of names to atoms. Opening reads indexes only.

    The keys are the names of parameters and buffers, in the order of the model. A tied name is not a key, but `read`
    accepts it and `state_dict` includes it.
    """

    index: Index
    """Everything that the files say, except the elements of tensors."""

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
        """Facts about the checkpoint, and its parameters."""
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
        """Parallel layout of the run that saved it."""
        return self.index.topology

    @property
    def step(self) -> int | None:
        """Training step, where recorded."""
        return self.index.step

    @property
    def extras(self) -> Mapping[str, object]:
        """What else was saved (client state, schedulers, ...), by name, if it is the same on all ranks.

        Plain values are as they were saved. Objects are not created: each is a `ucp.io.pickle.values.Stub`. Tensors
        are references, which `extra` and `tensor` read.
        """
        return _Extras({extra.name: extra.value for extra in self.index.extras if extra.rank is None})

    @property
    def atoms(self) -> Mapping[str, Atom]:
        """This mapping itself, so that code can say `checkpoint.atoms.items()`."""
        return self

    def read(self, name: str, state: str = WEIGHT, region: Region | None = None) -> torch.Tensor:
        """The global tensor of a state, or only its elements in `region`.

        `name` may be a tied name. `region`: part of the global tensor, in elements, e.g. `ucp.Box((0, 0), (4, 8))` or
        `numpy.s_[:4, :8]`. Raises KeyError for an unknown name or state, ValueError for a region outside of the
        tensor, MissingLibraryError without torch.
        """
        source = self._state(name, state)
        box = _to_box(region, source.global_shape, f"{name}/{state}")
        return _read(source, box, f"{name}/{state}", self.index.files)

    def state_dict(self, state: str = WEIGHT) -> dict[str, torch.Tensor]:
        """One state of all parameters and buffers that have it: name to tensor, as `load_state_dict` takes them.

        Tied names are included, and share the tensor that they are tied to. Raises KeyError if no parameter has the
        state, MissingLibraryError without torch.
        """
        tensors = {name: self.read(name, state) for name, atom in self.items() if state in atom.states}
        if not tensors and self:
            states = dict.fromkeys(name for atom in self.values() for name in atom.states)
            raise NoSuchNameError(f"no parameter has a state {state!r}; the states are {', '.join(states)}")
        ties = {name: tensors[stored] for name, stored in self.index.aliases.items() if stored in tensors}
        return {**tensors, **ties}

    def extra(self, name: str, rank: int | None = None) -> object:
        """The value of an extra, with its tensors read.

        `rank`: which rank's value, if ranks differ. NumPy arrays and counters are created; objects of other classes
        are not (see `extras`). A companion file, which a training script saved beside the checkpoint, is parsed if it
        is JSON or of torch.save: `extra("companion/scheduler.pt")`.

        Raises KeyError, which lists the names, MalformedError for a damaged file, MissingLibraryError without torch.
        """
        extras = self.index.extras
        by_rank = {extra.rank: extra for extra in reversed(extras) if extra.name == name}
        if rank in by_rank:
            return load_extra(by_rank[rank], self.tensor)
        if by_rank:
            ranks = ", ".join(str(extra.rank) for extra in extras if extra.name == name)
            raise NoSuchNameError(f"no extra {name!r} of rank {rank}; rank may be {ranks}")
        names = ", ".join(dict.fromkeys(extra.name for extra in extras)) or "none"
        raise NoSuchNameError(f"no extra {name!r}; there are {names}")

    def tensor(self, ref: TensorRef | InlineTensor) -> torch.Tensor:
        """The tensor that an extra refers to, e.g. an RNG state.

        Raises UsageError for anything but a reference, MissingLibraryError without torch.
        """
        if not isinstance(ref, TensorRef | InlineTensor):
            raise UsageError(f"expected a reference to a tensor from `.extras`; got {type(ref).__name__}")
        return _read(StateIndex.from_tensor(ref), Box.full(ref.shape), "an extra", self.index.files)

    def _state(self, name: str, state: str) -> StateIndex:
        """A state of a parameter. Raises NoSuchNameError, which lists the names that exist."""
        stored = self.index.aliases.get(name, name)
        if stored not in self.index.atoms:
            raise NoSuchNameError(_describe_unknown(self.index, name))
        states = self.index.atoms[stored].states
        if state not in states:
            raise NoSuchNameError(_describe_no_state(self.index.atoms[stored], state))
        return states[state]


_SHOWN = 50
"""Parameters that the page lists, at most."""


def _to_box(region: Region | None, shape: tuple[int, ...], what: str) -> Box:
    """A region as a box. Raises ValueError if it is not inside a tensor of that shape."""
    if region is None:
        return Box.full(shape)
    if isinstance(region, Box):
        if len(region.sizes) != len(shape) or any(a > b for a, b in zip(region.stops, shape, strict=True)):
            raise ValueError(f"region {region} is not inside {what} of shape {list(shape)}")
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
