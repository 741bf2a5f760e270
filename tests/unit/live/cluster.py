"""A small mixture of experts cut by hand over ranks that are threads: what every rank of a run must hold.

Whole tensors are numbers of their own; `local` cuts them with numpy alone, as a hand-written model would, and numbers
layers and experts from 0 on every stage and expert-parallel rank where it is asked to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

import ucp
from ucp.core.index import Fragment, ParamGroup, StateIndex
from ucp.core.region import Box
from ucp.core.tensor import DType, InlineTensor
from ucp.core.topology import Topology
from ucp.testing.handmade import Shards, make_index, write_checkpoint

STATES = ("weight", "exp_avg", "exp_avg_sq")
HYPER = {"lr": 0.5, "betas": (0.5, 0.75), "eps": 1e-6, "weight_decay": 0.25}
QKV, PROJ = "self_attention.linear_qkv.weight", "self_attention.linear_proj.weight"
EXPERT = "mlp.experts.local_experts."


@dataclass(frozen=True)
class Sizes:
    """A model."""

    layers: int = 4
    experts: int = 4
    vocab: int = 8
    hidden: int = 4
    ffn: int = 4

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the whole."""
        found: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            own = f"decoder.layers.{layer}."
            found |= {
                f"{own}input_layernorm.weight": (self.hidden,),
                f"{own}{PROJ}": (self.hidden, 8),
                f"{own}{QKV}": (24, self.hidden),
                f"{own}pre_mlp_layernorm.weight": (self.hidden,),
                f"{own}mlp.router.weight": (self.experts, self.hidden),
            }
            for expert in range(self.experts):
                found[f"{own}{EXPERT}{expert}.linear_fc1.weight"] = (2 * self.ffn, self.hidden)
                found[f"{own}{EXPERT}{expert}.linear_fc2.weight"] = (self.hidden, self.ffn)
        found["decoder.final_layernorm.weight"] = (self.hidden,)
        found["output_layer.weight"] = (self.vocab, self.hidden)
        return found


@dataclass
class Saved:
    """A checkpoint of it."""

    folder: Path
    sizes: Sizes = field(default_factory=Sizes)
    arrays: dict[tuple[str, str], np.ndarray] = field(init=False)
    path: Path = field(init=False)

    def __post_init__(self) -> None:
        shards, states, start = Shards(self.folder), {}, 1
        self.arrays = {}
        for name, shape in self.sizes.shapes().items():
            for state in STATES:
                array = np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape)
                start += array.size
                self.arrays[name, state] = array
                states[name, state] = shards.whole(array)
            step = np.array(9, dtype=np.float32)
            piece = Fragment(box=Box((), ()), ref=InlineTensor(data=step.tobytes(), dtype=DType.FLOAT32, shape=()))
            states[name, "step"] = StateIndex(dtype=DType.FLOAT32, global_shape=(), fragments=(piece,))
        group = ParamGroup(params=tuple(self.sizes.shapes()), hyper=HYPER)
        self.path = write_checkpoint(make_index(self.folder, states, groups=[group]))


@dataclass(frozen=True)
class Place:
    """A rank, counted without ucp: tp fastest, then cp, dp, pp; experts on the ranks of a stage once more."""

    run: Topology
    rank: int

    @property
    def within(self) -> int:
        return self.rank % (self.run.ranks // self.run.pp)

    @property
    def pp(self) -> int:
        return self.rank // (self.run.ranks // self.run.pp)

    @property
    def tp(self) -> int:
        return self.within % self.run.tp

    @property
    def etp(self) -> int:
        return self.within % self.run.expert_tp

    @property
    def ep(self) -> int:
        return self.within // self.run.expert_tp % self.run.ep


def cut(name: str, array: np.ndarray, at: Place) -> np.ndarray:
    """This rank's part of a tensor, by hand."""
    if "experts" in name:
        parts, own = at.run.expert_tp, at.etp
        if name.endswith("fc1.weight"):
            gate, up = np.split(array, 2)
            return np.concatenate([np.split(gate, parts)[own], np.split(up, parts)[own]])
        return np.split(array, parts, axis=1)[own]
    if name.endswith(("word_embeddings.weight", "output_layer.weight", QKV)):
        return np.split(array, at.run.tp)[at.tp]
    return np.split(array, at.run.tp, axis=1)[at.tp] if name.endswith(PROJ) else array


def local(saved: Saved, at: Place, *, numbers: str = "local") -> list[dict[str, tuple[str, dict[str, np.ndarray]]]]:
    """Per chunk: name in the rank's model to the name in the whole, and the states that it must have there."""
    sizes, run = saved.sizes, at.run
    chunks = []
    each = sizes.layers // (run.pp * run.vpp)
    for chunk in range(run.vpp):
        first = (chunk * run.pp + at.pp) * each
        names: dict[str, str] = {}
        if chunk == 0 and at.pp == 0:
            names["embedding.word_embeddings.weight"] = "embedding.word_embeddings.weight"
        for layer in range(each):
            number = layer if numbers == "local" else first + layer
            prefix, whole = f"decoder.layers.{number}.", f"decoder.layers.{first + layer}."
            rest = [own.removeprefix(whole) for own in sizes.shapes() if own.startswith(whole) and "experts" not in own]
            names |= {prefix + own: whole + own for own in rest}
            here = sizes.experts // run.ep
            for expert in range(here):
                called = expert if numbers == "local" else at.ep * here + expert
                for own in ("linear_fc1.weight", "linear_fc2.weight"):
                    names[f"{prefix}{EXPERT}{called}.{own}"] = f"{whole}{EXPERT}{at.ep * here + expert}.{own}"
        if chunk == run.vpp - 1 and at.pp == run.pp - 1:
            for own in ("decoder.final_layernorm.weight", "output_layer.weight"):
                names[own] = own
        chunks.append(
            {
                name: (whole, {state: cut(whole, saved.arrays[whole, state], at) for state in STATES})
                for name, whole in names.items()
            }
        )
    return chunks


def module(tensors: Mapping[str, tuple[int, ...] | torch.Tensor], *, fill: float = torch.nan) -> nn.Module:
    """A module with parameters of these names and shapes; a tensor is registered as it is, integers as buffers."""
    root = nn.Module()
    for name, held in tensors.items():
        tensor = held if isinstance(held, torch.Tensor) else torch.full(held, fill)
        holder, _, last = name.rpartition(".")
        at = _submodule(root, holder)
        if isinstance(tensor, nn.Parameter) or tensor.is_floating_point():
            at.register_parameter(last, tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor))
        else:
            at.register_buffer(last, tensor)
    return root


def module_of(checkpoint: ucp.Checkpoint, *parts: str) -> nn.Module:
    """A model of zeros with the tensors of a checkpoint, or with those that have one of `parts` in their names."""
    atoms = {name: atom for name, atom in checkpoint.atoms.items() if not parts or any(part in name for part in parts)}
    model = module({name: torch.zeros(atom.global_shape, dtype=atom.dtype("weight")) for name, atom in atoms.items()})
    for alias, name in checkpoint.index.aliases.items():
        if name in atoms:
            holder, _, last = alias.rpartition(".")
            setattr(_submodule(model, holder), last, model.get_parameter(name))
    return model


def _submodule(root: nn.Module, path: str) -> nn.Module:
    """The module at a dotted path, made where it is not there."""
    for part in filter(None, path.split(".")):
        if part not in dict(root.named_children()):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root
