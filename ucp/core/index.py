"""The index of a checkpoint: every parameter as one *atom*, and the fragments in which files store it.

A format reads an `Index` from a path: names, shapes and references, no tensor bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod

from ucp.core.layout import Layout, Overlap
from ucp.core.region import Box
from ucp.core.tensor import DType, Record, Tensor, TensorRef
from ucp.core.text.page import Page, Report
from ucp.core.topology import Topology
from ucp.errors import UsageError, format_count, format_list

WEIGHT = "weight"
"""State of the parameter itself, in the best precision of the checkpoint (the fp32 master if there is one)."""

STEP = "step"
"""State with the number of optimizer steps; 0-d."""

SIDECAR = "companion/"
"""Prefix of extras whose value refers to all bytes of a sidecar file; the name of the file follows."""

TAG = "tag"
"""Extra with the tag of the checkpoint, for frameworks that let the script choose it."""


class Kind(StrEnum):
    """What a tensor of a model is to its optimizer."""

    PARAMETER = "parameter"
    """Trained."""
    FROZEN = "frozen"
    """A parameter that is not trained: no optimizer state."""
    BUFFER = "buffer"
    """Not a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """A piece of a source: a box of the global tensor and where its elements are stored."""

    box: Box
    """Box of the global tensor."""
    ref: Tensor
    """Stored elements; its shape is the size of the box."""
    replica: int = 0
    """0 for the bytes to use; above, a copy that must be equal (after a cast, if its dtype is narrower)."""
    term: int = 0
    """Number of the summand, if the state is a mean (MEAN); of the patch, from 1, if it is PATCHED."""
    derived: bool = False
    """Whether a rank computed it from another fragment (the model's weight from its master): compared, never used."""

    def __post_init__(self) -> None:
        if self.ref.shape != self.box.sizes:
            raise ValueError(f"{self.ref.shape} elements stored for a box of {self.box.sizes}")

    @property
    def path(self) -> str | None:
        """File of the bytes; None if the index itself has them."""
        return self.ref.path if isinstance(self.ref, TensorRef) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateIndex:
    """One state of an atom: its dtype and its fragments."""

    dtype: DType
    """Dtype of the fragments with replica 0, before any requested cast."""
    global_shape: tuple[int, ...]
    """The atom's shape; for a count such as `step`, () or 1 in each dim."""
    fragments: tuple[Fragment, ...]
    """Fragments; those with replica 0 tile the tensor (once per term, if `overlap` is MEAN; without patches, if it is
    PATCHED)."""
    overlap: Overlap = Overlap.EXCLUSIVE
    """MEAN if the terms are to be averaged, PATCHED if terms above 0 are patches."""
    layout: Layout | None = None
    """Layout in which ranks stored it, if not the atom's: FSDP1 saves by rows some states that it keeps flat."""
    digests: tuple[str, ...] = ()
    """Recorded xxh3-64 of every `digest_nbytes` bytes of the row-major elements."""
    digest_nbytes: int = 0
    """Bytes per digest; the last one may cover fewer."""
    checksum: str = ""
    """Recorded checksum of all row-major elements, as "adler32:HEX"; empty if there is none."""

    @classmethod
    def from_tensor(cls, ref: Tensor) -> StateIndex:
        """The state with this tensor as its only fragment."""
        fragment = Fragment(box=Box.full(ref.shape), ref=ref)
        return cls(dtype=ref.dtype, global_shape=ref.shape, fragments=(fragment,))

    @property
    def numel(self) -> int:
        """Elements of the global tensor."""
        return prod(self.global_shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class AtomIndex:
    """One parameter or buffer as a global tensor, with all its states."""

    name: str
    """Name in the model."""
    global_shape: tuple[int, ...]
    """Elements per dim."""
    kind: Kind
    """Parameter, frozen parameter or buffer."""
    states: Mapping[str, StateIndex]
    """State name to state; always has `weight`."""
    model_dtype: DType | None = None
    """Dtype in which the model computes, if not the weight's (mixed precision)."""
    layout: Layout = field(default_factory=Layout)
    """Layout over the mesh of the run that saved it; without axes if it is unsharded or made of other tensors."""
    iteration: int | None = None
    """Training step of all its states, if it differs from the index's, as in a chain or a window."""
    is_cast: bool = False
    """Whether it is only the weight with which the model computes: a link of a window that lacks its full states."""
    made_of: Mapping[str, Layout] = field(default_factory=dict)
    """Name to layout of the tensors of that run from which it was joined, split or transposed; empty if it was not."""

    @property
    def patterns(self) -> Mapping[str, str]:
        """Mesh axis to the name of its pattern; for an atom made of other tensors, the pattern of the first of them."""
        return next((layout.patterns for layout in (self.layout, *self.made_of.values()) if layout.all_axes), {})

    def layouts(self) -> Iterator[tuple[str, str, Layout]]:
        """(parameter, state, layout over the run that saved it) for every state that has the atom's shape."""
        for name, state in self.states.items():
            if state.global_shape == self.global_shape and not self.is_count(name):
                layout_of_state = self.layout if state.layout is None else state.layout
                yield from ((self.name, name, layout) for layout in (layout_of_state, *self.made_of.values()))

    def is_count(self, state: str) -> bool:
        """Whether a state is a single number for the parameter, such as `step`: 0-d, or a tensor of one element."""
        state_index = self.states[state]
        return state == STEP or (state_index.numel == 1 and state_index.global_shape != self.global_shape)

    def dtype_of(self, state: str, requested: Mapping[str, str]) -> DType:
        """Dtype to write a state in: the one `requested` for its name; buffers and integers keep theirs."""
        dtype = self.states[state].dtype
        is_cast = state in requested and self.kind is not Kind.BUFFER and dtype.is_floating
        return DType(requested[state]) if is_cast else dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(state.nbytes for state in self.states.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroup:
    """Parameters that share optimizer hyper-parameters, in the optimizer's order."""

    params: tuple[str, ...]
    """Names, in the order of the optimizer."""
    hyper: Mapping[str, object]
    """Plain values: lr, betas, weight_decay, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """Something in a checkpoint that is not a tensor of a parameter."""

    name: str
    """What it is: a path-like name such as "lr_scheduler" or "client_state/iteration"."""
    value: object
    """Plain values, `Stub`s and `TensorRef`s (see `ucp.io.pickle.values`)."""
    rank: int | None = None
    """Rank that has this value, if ranks have different ones; None for all ranks."""

    @property
    def is_sidecar(self) -> bool:
        """Whether its value is a sidecar file: one that a training script saves beside the checkpoint."""
        return self.name.startswith(SIDECAR)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file that an index refers to, as it was when it was read."""

    path: str
    """Absolute path."""
    nbytes: int
    """Bytes."""
    mtime_ns: int
    """Time of last change, nanoseconds since 1970."""
    role: str
    """What it holds, e.g. "optimizer states of dp rank 3"."""
    version: str = ""
    """Version of its contents in the storage service (ETag, generation); empty on a disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostStates:
    """Why a parameter lost optimizer states, or its place in a parameter group."""

    reason: str
    """Reason and remedy, for people; printed before a list of such parameters."""
    detail: str = ""
    """Text to print after the name of the parameter."""
    is_chosen: bool = False
    """Whether the user left them out; else the source lacks them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnnamedStates:
    """States of an optimizer that could not be matched to parameters."""

    states: tuple[str, ...]
    """Names of the states; empty if the optimizer had not stepped."""
    reason: str
    """What was expected, what is there, and what to do."""


class DoubtKind(StrEnum):
    """Why readable files of a checkpoint may not be those that were saved."""

    EQUAL_RANKS = "equal-ranks"
    """Files of two ranks that hold different parts of the model have the same bytes."""
    MISSING_LAYERS = "missing-layers"
    """A tied layer of a pipeline has no file; for some models DeepSpeed writes none."""
    MOMENT_SHAPES = "moment-shapes"
    """Moments of the optimizer do not have the shapes of their parameters."""
    CONFIG = "config"
    """The config.json beside the tensors is that of another model."""
    EXPERTS = "experts"
    """Experts of a layer are missing, or do not have the tensors that the others have."""
    LAYOUT = "layout"
    """Ranks hold other pieces of tensors than the rules of the model family say: the family may be wrong."""

    @classmethod
    def accepted(cls, requested: Iterable[str]) -> frozenset[DoubtKind]:
        """The kinds that a user names. Raises UsageError for an unknown name."""
        names = (requested,) if isinstance(requested, str) or not isinstance(requested, Iterable) else tuple(requested)
        if not set(names) <= set(cls):
            raise UsageError(f"expected accept to be a list of names among {', '.join(cls)}; got {requested!r}")
        return frozenset(map(cls, names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A suspicion about a checkpoint, which is converted or loaded only if the user accepts it."""

    kind: DoubtKind
    """Kind; `--accept KIND` accepts the doubt."""
    text: str
    """What was expected, what was found, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerKeys:
    """Where one optimizer is in the state dict of a training script."""

    root: tuple[object, ...]
    """Keys that lead to it."""
    is_flat: bool = False
    """Whether names and settings are joined to one key, as by `flatten_optimizer_state_dict`."""
    groups: tuple[int, ...]
    """Its parameter groups, as positions among the groups of the checkpoint."""
    params: Mapping[str, str | int] = field(default_factory=dict)
    """Name of a parameter to its key in the optimizer, if that differs: a number, or a name with wrappers' prefixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDictKeys:
    """Where model and optimizers are in the state dict of a training script."""

    model: tuple[object, ...]
    """Keys that lead to the model."""
    params: Mapping[str, str] = field(default_factory=dict)
    """Name of a parameter or buffer to its key there, if that differs: a name with wrappers' prefixes."""
    optimizers: tuple[OptimizerKeys, ...] = ()
    """Every optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Index(Report):
    """A checkpoint, without its tensor bytes."""

    path: str
    """Directory or file of the checkpoint, absolute (e.g. the folder that `latest` names)."""
    format: str
    """Name of the format that read it."""
    evidence: tuple[str, ...]
    """What the format was recognised by."""
    producer: str
    """Program and version that wrote it, as far as they are recorded."""
    topology: Topology
    """Layout of the run that wrote it."""
    step: int | None
    """Training step, where recorded."""
    skipped: int = 0
    """How many of these steps changed nothing, as gradients overflowed; 0 if that is not recorded."""
    atoms: Mapping[str, AtomIndex]
    """Name to atom, in the order of the model."""
    groups: tuple[ParamGroup, ...] = ()
    """Optimizer parameter groups; empty when there is no optimizer state."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied name to the name it is stored under."""
    extras: tuple[Extra, ...] = ()
    """Everything else."""
    files: tuple[SourceFile, ...] = ()
    """Files read or referred to."""
    records: tuple[Record, ...] = ()
    """Byte ranges with a recorded checksum."""
    notes: tuple[str, ...] = ()
    """What was assumed or inferred."""
    dropped: tuple[str, ...] = ()
    """What the source holds and the atoms do not, each with the reason; for people, so long lists are cut short."""
    lost: Mapping[str, LostStates] = field(default_factory=dict)
    """Each parameter that is known to have lost states, and why."""
    unnamed: UnnamedStates | None = None
    """States of its optimizer that could not be matched to parameters; None if all were matched."""
    is_numbered: bool = False
    """Whether its optimizer numbers its parameters, so that their names were inferred."""
    doubts: tuple[Doubt, ...] = ()
    """Reasons to suspect that its files are not those that were saved."""
    unselected: int = 0
    """Number of parameters that --include/--exclude left out, now or when the store at `path` was written."""
    recorded_in: Mapping[str, str] = field(default_factory=dict)
    """Mesh axis to the file and field that record the layout over it; empty if only a model family knows it."""
    origin: str = ""
    """Format of the checkpoint that the extras come from, if a store kept them; empty if it is `format`."""
    unordered: bool = False
    """Whether atoms are listed by name because the order in which the model registers its parameters is unknown."""
    keys: StateDictKeys | None = None
    """Keys of the state dict that a training script saved, if the files hold this dict."""
    unchecked: tuple[str, ...] = ()
    """Notes on what was not proved, such as files that were not read and have no checksum; also in `notes`."""

    def states(self) -> Iterator[tuple[AtomIndex, str, StateIndex]]:
        """(atom, name of the state, state) for every state of every atom."""
        for atom in self.atoms.values():
            for name, state in atom.states.items():
                yield atom, name, state

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name of every atom to its shape."""
        return {name: atom.global_shape for name, atom in self.atoms.items()}

    def loss_reasons(self, params: Iterable[str]) -> tuple[str, ...]:
        """Why those of `params` that are in `lost` lack states: each reason once, with its parameters."""
        names: dict[str, list[str]] = {}
        for name in params:
            if name in self.lost:
                loss = self.lost[name]
                names.setdefault(loss.reason, []).append(f"{name}: {loss.detail}" if loss.detail else name)
        return tuple(f"{why}:\n{format_list(params_of_reason)}" for why, params_of_reason in names.items())

    @property
    def nbytes(self) -> int:
        """Bytes of all states of all atoms."""
        return sum(atom.nbytes for atom in self.atoms.values())

    def __repr__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        params = format_count(len(self.atoms), "parameter")
        return f"<{self.format} checkpoint {self.path}: {params}, {self.topology}{step}>"

    def page(self) -> Page:
        """What it is, what is missing, its states, its notes."""
        from ucp.core.text.overview import overview, remarks  # imports this module

        return (*overview(self), *remarks(self))
