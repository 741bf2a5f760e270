"""The module of a pipeline, put together from the files of its layers.

`layer_03-...` holds the state_dict of layer 3, whose parameters are called `3.weight`, and so on. A layer that is tied
to another (TiedLayerSpec) is called by its key, `tied_modules.emb.weight`, which its file does not say: it is the key
whose parameters, by name and shape, are in the file. A tied layer with a `forward_fn` has no file
(runtime/pipe/module.py, 0.19.8), and one key can have files under several layers: these are copies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ucp.core.tensor import TensorRef
from ucp.errors import UnsupportedError
from ucp.io.pickle.fields import Shape, mapping, shapes, text
from ucp_formats.deepspeed.read.grid import SavedGrid
from ucp_formats.deepspeed.read.run import SavedFile

__all__ = ["TIED", "layer_starts", "pipeline_modules", "untrained"]

TIED = "tied_modules."
"""Start of the names of tied parameters."""

_UNIONS = ("frozen_param_shapes", "frozen_param_fragments", "shared_params")


@dataclass(slots=True)
class _Named:
    """What the stages say of names."""

    numbers: set[int]
    """Layers that parameters or buffers are named by."""
    tied: dict[str, dict[str, Shape | int | None]]
    """Key of tied layers to the names below it, with the shape, or number of elements, where it is known."""


def pipeline_modules(grid: SavedGrid, tp: int, trained: Mapping[str, Shape | int | None]) -> list[SavedFile]:
    """Model-states files as they would be without layer files, for tensor-parallel rank `tp`.

    The first has every layer; the others have copies of tied ones. `trained`: parameters of the optimizers of all
    stages, with their shapes or numbers of elements where they are known.
    """
    stages = [run.model for mp, run in grid.runs.items() if grid.slice(mp) == tp]
    starts = layer_starts(grid, tp, trained)
    modules: list[OrderedDict[object, object]] = [OrderedDict()]
    metadata: OrderedDict[object, object] = OrderedDict()
    for layer in (file for file in grid.layers if file.name.tp == tp):
        start = starts[layer.name.layer]
        own = {f"{start}{text(key, f'a name in {layer.path}')}": value for key, value in layer.root.items()}
        module = next((module for module in modules if not own.keys() & module.keys()), None)
        if module is None:
            modules.append(module := OrderedDict())
        module.update(own)
        versions = getattr(layer.root, "_metadata", None)
        if isinstance(versions, Mapping):
            prefix = start.removesuffix(".")
            metadata.update((f"{prefix}.{key}" if key else prefix, version) for key, version in versions.items())
    if metadata:
        vars(modules[0])["_metadata"] = metadata
    shared = _shared(stages)
    return [replace(stages[0], root={**stages[0].root, **shared, "module": module}) for module in modules]


def layer_starts(grid: SavedGrid, tp: int, trained: Mapping[str, Shape | int | None]) -> dict[int, str]:
    """Layer to what the names of its parameters start with; for layers with a file."""
    named = _named([run.model for mp, run in grid.runs.items() if grid.slice(mp) == tp], trained)
    return {file.name.layer: _start(file, named) for file in grid.layers if file.name.tp == tp}


def _named(stages: Sequence[SavedFile], trained: Mapping[str, Shape | int | None]) -> _Named:
    known: dict[str, Shape | int | None] = dict(trained)
    for file in stages:
        known |= untrained(file)
    named = _Named(set(), {})
    for name, shape in known.items():
        first, _, rest = name.partition(".")
        if first.isdigit():
            named.numbers.add(int(first))
        elif name.startswith(TIED):
            key, _, below = rest.partition(".")
            named.tied.setdefault(key, {})[below] = shape
    return named


def untrained(file: SavedFile) -> dict[str, Shape | None]:
    """Buffers and frozen parameters that the file of a stage names, with their shapes where it has them."""
    buffers = file.root.get("buffer_names")
    found: dict[str, Shape | None] = dict.fromkeys(map(str, buffers if isinstance(buffers, list) else ()))
    frozen = file.root.get("frozen_param_shapes")
    return found if frozen is None else {**found, **shapes(frozen, f"frozen_param_shapes of {file.path}")}


def _start(layer: SavedFile, named: _Named) -> str:
    """What the names of a layer's parameters start with."""
    number = layer.name.layer
    if number in named.numbers:
        return f"{number}."
    fitting = [key for key, own in named.tied.items() if _fits(layer.root, own)]
    if len(fitting) > 1:
        raise UnsupportedError(
            f"{layer.path} could be the tied layer {' or '.join(fitting)}: their parameters have the same names and "
            "shapes. Save again with names below the tied layers that differ"
        )
    return f"{TIED}{fitting[0]}." if fitting else f"{number}."


def _fits(saved: Mapping[object, object], own: Mapping[str, Shape | int | None]) -> bool:
    """Whether a file has all tensors that a tied key is known to have."""
    refs = {name: saved.get(name) for name in own}
    return all(isinstance(ref, TensorRef) and own[name] in (None, ref.shape, ref.numel) for name, ref in refs.items())


def _shared(stages: Sequence[SavedFile]) -> dict[object, object]:
    """Keys that stages have a part of each."""
    found: dict[object, object] = {}
    buffers = [file.root.get("buffer_names") for file in stages]
    if all(isinstance(own, list) for own in buffers):
        found["buffer_names"] = list(dict.fromkeys(name for own in buffers if isinstance(own, list) for name in own))
    for key in _UNIONS:
        parts = [mapping(file.root[key], f"{key} of {file.path}") for file in stages if file.root.get(key) is not None]
        if parts:
            found[key] = OrderedDict((name, value) for part in parts for name, value in part.items())
    return found
