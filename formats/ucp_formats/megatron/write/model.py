"""The model that is to be written: every parameter under its canonical name, and the atoms that it is made of.

Sources name parameters in styles of their own, and some keep as several tensors what Megatron keeps as one (query, key
and value). A family says how they join; from here on there is one tensor per canonical name, and `parts` says which
stretches of which atoms fill any piece of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ucp.core.dtypes import DType
from ucp.core.fused_names import Stretch
from ucp.core.index import AtomIndex, Index, Kind
from ucp.core.names import STEP, WEIGHT
from ucp.core.region import Box, RegionPair, compose
from ucp.core.slices import Slice
from ucp.errors import FamilyError, MissingStateError, TopologyError, UnsupportedError, listed
from ucp.families.family import Family, Match, Named
from ucp.io.torch_file.draft import Part

__all__ = ["Model", "ModelTensor", "check_layers", "target_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensor:
    """A parameter or buffer of the model, as a whole."""

    name: str
    """Canonical name."""
    match: Match
    """The rule it falls under."""
    shape: tuple[int, ...]
    """Elements per dim."""
    kind: Kind
    """Trained, frozen, or a buffer."""
    dtype: DType
    """Element type that the model computes in."""
    states: Mapping[str, DType]
    """States with a value per element, the weight among them, and the type that the source has each in."""
    pieces: tuple[Stretch, ...] = field(repr=False)
    """The atoms that tile it."""

    @property
    def layer(self) -> int | None:
        """Number of its layer among those of the decoder; None for a tensor of none of them."""
        return self.match.fields.get("layer") if self.name.startswith("decoder.layers.") else None

    @property
    def expert(self) -> int | None:
        """Number of its expert among all; None for a tensor of no routed expert."""
        return self.match.fields.get("expert")

    def parts(
        self, pairs: Sequence[RegionPair], local_shape: tuple[int, ...], state: str, dtype: DType
    ) -> tuple[Part, ...]:
        """Slices that fill a local tensor which holds `pairs` of this one, in increasing offset.

        Raises TopologyError where an atom's part of it does not lie in one stretch.
        """
        if len(self.pieces) == 1 and self.pieces[0].whole == self.pieces[0].local:
            return (_part(self.pieces[0].atom, state, dtype, tuple(pairs), local_shape),)
        found = []
        for pair in pairs:
            for piece in self.pieces:
                for own in compose((RegionPair(piece.local, piece.whole),), (pair,)):
                    if not own.local.is_flat_in(local_shape):
                        raise TopologyError(
                            f"{piece.atom} is one of several tensors that make {self.name}, and is not in one stretch "
                            f"in the part {pair.whole} of it. Convert to another layout (tp=1), and from there"
                        )
                    alone = RegionPair(own.whole, Box.whole(own.whole.sizes))
                    start = own.local.flat_start(local_shape)
                    found.append(_part(piece.atom, state, dtype, (alone,), own.whole.sizes, offset=start))
        return tuple(sorted(found, key=lambda part: part.offset))


def _part(
    atom: str, state: str, dtype: DType, pairs: tuple[RegionPair, ...], shape: tuple[int, ...], *, offset: int = 0
) -> Part:
    """All of a local tensor of `shape` that holds `pairs` of an atom."""
    numel = Box.whole(shape).numel
    own = Slice(param=atom, state=state, dtype=dtype, pairs=pairs, local_shape=shape, start=0, stop=numel)
    return Part(offset=offset, slice=own)


@dataclass(frozen=True, kw_only=True)  # no slots: its counts are asked for once per tensor, and kept
class Model:
    """All tensors of the model."""

    family: Family
    """Its rules, fitted to it."""
    tensors: tuple[ModelTensor, ...]
    """Its tensors, in the order in which Megatron registers them."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name to elements per dim."""
        return {own.name: own.shape for own in self.tensors}

    @property
    def dtypes(self) -> set[DType]:
        """Types that it computes in."""
        return {own.dtype for own in self.tensors if own.kind is Kind.PARAMETER}

    @cached_property
    def layers(self) -> int:
        """Layers of the decoder."""
        return 1 + max((own.layer for own in self.tensors if own.layer is not None), default=-1)

    @cached_property
    def experts(self) -> int:
        """Routed experts of a layer; 0 where there are none."""
        return 1 + max((own.expert for own in self.tensors if own.expert is not None), default=-1)

    @property
    def expert_layers(self) -> frozenset[int]:
        """Layers that have routed experts."""
        return frozenset(own.layer for own in self.tensors if own.expert is not None and own.layer is not None)

    @property
    def joined(self) -> dict[str, tuple[Stretch, ...]]:
        """Tensor to the stretches of atoms that it is made of; empty where every atom is one under its own name."""
        if all(own.pieces[0].atom == own.name for own in self.tensors):
            return {}
        return {own.name: own.pieces for own in self.tensors}

    @property
    def expert_atoms(self) -> frozenset[str]:
        """Names of the atoms of routed experts."""
        return frozenset(piece.atom for own in self.tensors if own.expert is not None for piece in own.pieces)


def target_model(index: Index, family: Family, *, weights: DType | None = None) -> Model:
    """The model whose atoms `index` holds, by the rules of `family`. `weights`: type to compute in, if not their own.

    Raises
    ------
    FamilyError
        Names without a rule; all are named.
    UnsupportedError
        Atoms that cannot be told apart by layer, or tensors of which parts are missing.
    """
    named = _named(index, family)
    by_name: dict[str, list[tuple[AtomIndex, Named]]] = {}
    for atom, own in named:
        by_name.setdefault(own.canonical, []).append((atom, own))
    matches = family.match(by_name)
    tensors = [_tensor(family, matches[name], by_name[name], weights) for name in family.sorted(matches)]
    return Model(family=family, tensors=tuple(tensors))


def check_layers(model: Model, *, alike: bool) -> None:
    """Prove that no layer and no expert lacks a parameter: Megatron would ask for it, and not find it.

    `alike`: whether all layers have the same parameters, by the arguments of the run. Raises MissingStateError.
    """
    held: dict[int, dict[str, tuple[int, ...]]] = {layer: {} for layer in range(model.layers)}
    for own in model.tensors:
        if own.layer is not None:
            held[own.layer][own.name.split(".", 3)[3]] = own.shape
    wanted = {name: shape for layer in held.values() for name, shape in layer.items()} if alike else {}
    lacking = [f"layer {layer}: every parameter" for layer, own in held.items() if not own]
    for layer, names in held.items():
        expected = wanted or _of_all_experts(names, model.experts)
        lacking += [
            f"layer {layer}: {name} {list(s)}" for name, s in expected.items() if names and names.get(name) != s
        ]
    if lacking:
        raise MissingStateError(
            f"expected every parameter of all layers; {len(lacking)} are not there:\n{listed(lacking)}\n"
            "take a checkpoint with all of them, and drop --include and --exclude; where layers differ, say how, as in "
            "--set moe_layer_freq=[0,1]"
        )


def _of_all_experts(names: Mapping[str, tuple[int, ...]], experts: int) -> dict[str, tuple[int, ...]]:
    """Parameters that a layer must have because it has those of one expert."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in names.items():
        head, marker, rest = name.partition(".local_experts.")
        if marker:
            last = rest.partition(".")[2]
            found |= {f"{head}{marker}{expert}.{last}": shape for expert in range(experts)}
    return found


def _named(index: Index, family: Family) -> list[tuple[AtomIndex, Named]]:
    found, without, stacked = [], [], []
    for atom in index.atoms.values():
        own = family.read(atom.name)
        if own is None and not family.ignores(atom.name):
            without.append(atom.name)
        elif own is not None and own.stacked:
            stacked.append(f"{atom.name} counts {', '.join(own.stacked)} in its leading dims")
        elif own is not None:
            found.append((atom, own))
    if without:
        family.match(without)  # raises, with all of them and what to do
        raise FamilyError(f"no rule of {family.name!r} gives these a name of Megatron:\n{listed(without)}")
    if stacked:
        raise UnsupportedError(
            f"expected one atom per layer and expert; got\n{listed(stacked)}\n"
            "Convert the checkpoint that they come from with ucp again"
        )
    _check_order(found)
    return found


def _check_order(found: Iterable[tuple[AtomIndex, Named]]) -> None:
    """Raise UnsupportedError for atoms whose elements go in another order than Megatron's."""
    turned = [
        f"{atom.name} {list(atom.global_shape)}: {own.canonical}, "
        + (f"dims in the order {list(own.alias.order)}" if own.alias.order else "looked at in another shape")
        for atom, own in found
        if own.alias is not None and (own.alias.order or own.alias.view)
    ]
    if turned:
        raise UnsupportedError(
            f"expected tensors whose dims go as Megatron's, [out, in]; {len(turned):,} do not, and ucp transposes "
            f"nothing yet:\n{listed(turned)}\nTranspose them where the model was trained, under names of modules that "
            "keep [out, in] (GPT-2's Conv1D keeps [in, out]), and save again"
        )


def _tensor(
    family: Family, match: Match, atoms: Sequence[tuple[AtomIndex, Named]], weights: DType | None
) -> ModelTensor:
    first, own = atoms[0]
    ordered = sorted(atoms, key=lambda item: item[1].part)
    wanted = 1 if own.alias is None else len(own.alias.names)
    if [named.part for _, named in ordered] != list(range(wanted)):
        raise UnsupportedError(
            f"expected {wanted} tensors that make {match.name}; got {', '.join(atom.name for atom, _ in ordered)}. "
            "Take the whole model, or choose another family with --family"
        )
    whole = Box.whole(first.global_shape)
    pieces: tuple[Stretch, ...] = (Stretch(atom=first.name, whole=whole, local=whole),)
    if own.alias is not None and (wanted > 1 or own.alias.groups is not None):
        pairs = own.alias.pieces([atom.global_shape for atom, _ in ordered], family.values)
        pieces = tuple(Stretch(atom=ordered[pair.copy][0].name, whole=pair.whole, local=pair.local) for pair in pairs)
    is_buffer = match.buffer or first.kind is Kind.BUFFER
    return ModelTensor(
        name=match.name,
        match=match,
        shape=tuple(map(max, zip(*(piece.whole.stops for piece in pieces), strict=True))),
        kind=Kind.BUFFER if is_buffer else first.kind,
        dtype=weights if weights and not is_buffer else _model_dtype(first),
        states=_states([atom for atom, _ in ordered]),
        pieces=pieces,
    )


def _states(atoms: Sequence[AtomIndex]) -> dict[str, DType]:
    """States that all atoms have, one value per element."""
    first = atoms[0]
    held = [{name for name, own in atom.states.items() if own.global_shape == atom.global_shape} for atom in atoms]
    shared = set.intersection(*held) - {STEP}
    found = {name: state.dtype for name, state in first.states.items() if name in shared}
    return found if WEIGHT in first.states else {**found, WEIGHT: _model_dtype(first)}


def _model_dtype(atom: AtomIndex) -> DType:
    """Element type that the model computes in."""
    return atom.model_dtype or atom.states[WEIGHT].dtype
