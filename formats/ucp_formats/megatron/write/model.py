"""The model that is to be written: every parameter under its canonical name, and the atoms that it is made of.

Sources name parameters in styles of their own, and some keep as several tensors what Megatron keeps as one (query, key
and value). A family says how they join; from here on there is one tensor per canonical name, and `parts` says which
stretches of which atoms fill any piece of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ucp.core.dtypes import DType
from ucp.core.index import AtomIndex, Index, Kind
from ucp.core.layout import Layout
from ucp.core.names import STEP, WEIGHT
from ucp.core.region import Box, RegionPair
from ucp.core.slices import Slice
from ucp.errors import MissingStateError, listed
from ucp.families.family import Family, Match
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

    @property
    def layer(self) -> int | None:
        """Number of its layer among those of the decoder; None for a tensor of none of them."""
        return self.match.fields.get("layer") if self.name.startswith("decoder.layers.") else None

    @property
    def expert(self) -> int | None:
        """Number of its expert among all; None for a tensor of no routed expert."""
        return self.match.fields.get("expert")

    def parts(
        self,
        pairs: Sequence[RegionPair],
        local_shape: tuple[int, ...],
        state: str,
        dtype: DType,
        layout: Layout | None = None,
    ) -> tuple[Part, ...]:
        """The slice that fills a local tensor which holds `pairs` of this one, by its `layout`."""
        own = Slice(
            param=self.name,
            state=state,
            dtype=dtype,
            pairs=tuple(pairs),
            local_shape=local_shape,
            start=0,
            stop=Box.whole(local_shape).numel,
        )
        return (Part(offset=0, slice=own, layout=layout),)


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
    def expert_atoms(self) -> frozenset[str]:
        """Names of the atoms of routed experts."""
        return frozenset(own.name for own in self.tensors if own.expert is not None)


def target_model(index: Index, family: Family, *, weights: DType | None = None) -> Model:
    """The model whose atoms `index` holds, by the rules of `family`. `weights`: type to compute in, if not their own.

    Raises
    ------
    FamilyError
        Names without a rule; all are named.
    UnsupportedError
        Atoms that cannot be told apart by layer, or tensors of which parts are missing.
    """
    matches = family.match(index.atoms)
    return Model(
        family=family,
        tensors=tuple(_tensor(matches[name], index.atoms[name], weights) for name in family.sorted(matches)),
    )


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


def _tensor(match: Match, atom: AtomIndex, weights: DType | None) -> ModelTensor:
    is_buffer = match.buffer or atom.kind is Kind.BUFFER
    return ModelTensor(
        name=match.name,
        match=match,
        shape=atom.global_shape,
        kind=Kind.BUFFER if is_buffer else atom.kind,
        dtype=weights if weights and not is_buffer else _model_dtype(atom),
        states=_states(atom),
    )


def _states(atom: AtomIndex) -> dict[str, DType]:
    """States with one value per element."""
    return {
        name: own.dtype for name, own in atom.states.items() if own.global_shape == atom.global_shape and name != STEP
    }


def _model_dtype(atom: AtomIndex) -> DType:
    """Element type that the model computes in."""
    return atom.model_dtype or atom.states[WEIGHT].dtype
