"""Builds the module of a pipeline from the files of its layers.

`layer_03-...` holds the state_dict of layer 3, whose parameters the module names `3.weight`, and so on. The names of a
tied layer (TiedLayerSpec) start with its key instead, as in `tied_modules.emb.weight`. Its file does not record the
key: it is the one whose parameters have the names and shapes in the file. A tied layer with a `forward_fn` has no file
(runtime/pipe/module.py, 0.19.8). If several layers with the same key have files, these are copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ucp.core.tensor import TensorRef
from ucp.errors import UnsupportedError
from ucp.io.pickle.fields import Shape
from ucp_formats.deepspeed.read.module import ModelStates, SavedModule
from ucp_formats.deepspeed.read.run import TIED, SavedGrid


def pipeline_modules(grid: SavedGrid, tp: int, trained: Mapping[str, Shape | int | None]) -> list[ModelStates]:
    """Model states of tensor-parallel rank `tp`, as if one file held the modules of all layers.

    The first result has every layer; the others have further copies of tied layers. `trained`: parameters of the
    optimizers of all stages, with their shapes or numbers of elements where they are known.
    """
    stages = [run.model for run in grid.stages(tp).values()]
    prefixes = layer_prefixes(grid, tp, trained)
    modules: list[tuple[dict[str, TensorRef], dict[str, object]]] = [({}, {})]
    versions: dict[object, object] = {}
    for file, layer in grid.layers.items():
        if file.tp != tp:
            continue
        prefix = prefixes[file.layer]
        tensors = {f"{prefix}{name}": ref for name, ref in layer.tensors.items()}
        others = {f"{prefix}{name}": value for name, value in layer.others.items()}
        names = tensors.keys() | others.keys()
        module = next((module for module in modules if not (module[0].keys() | module[1].keys()) & names), None)
        if module is None:
            modules.append(module := ({}, {}))
        module[0].update(tensors)
        module[1].update(others)
        start = prefix.removesuffix(".")
        versions |= {f"{start}.{key}" if key else start: version for key, version in (layer.versions or {}).items()}
    buffers = [stage.buffers for stage in stages if stage.buffers is not None]
    model = replace(  # the first stage, with the records of all stages
        stages[0],
        buffers=tuple(dict.fromkeys(name for names in buffers for name in names))
        if len(buffers) == len(stages)
        else stages[0].buffers,
        frozen={name: shape for stage in stages for name, shape in stage.frozen.items()},
        fragments={name: ref for stage in stages for name, ref in stage.fragments.items()},
        shared={alias: name for stage in stages for alias, name in stage.shared.items()},
    )
    first, *copies = [SavedModule(tensors=tensors, others=others) for tensors, others in modules]
    return [replace(model, module=module) for module in (replace(first, versions=versions or None), *copies)]


def layer_prefixes(grid: SavedGrid, tp: int, trained: Mapping[str, Shape | int | None]) -> dict[int, str]:
    """Number of each layer that has a file to the prefix of its parameters' names in the module."""
    known: dict[str, Shape | int | None] = dict(trained)
    for run in grid.stages(tp).values():
        known |= run.model.untrained
    numbers = {int(first) for name in known if (first := name.partition(".")[0]).isdigit()}
    tied: dict[str, dict[str, Shape | int | None]] = {}
    for name, shape in known.items():
        if name.startswith(TIED):
            key, _, local_name = name.removeprefix(TIED).partition(".")
            tied.setdefault(key, {})[local_name] = shape
    prefixes = {}
    for file, layer in grid.layers.items():
        if file.tp != tp:
            continue
        prefixes[file.layer] = f"{file.layer}."
        if file.layer not in numbers:  # it may be a tied layer
            keys = [
                key
                for key, shapes in tied.items()
                if all(
                    (ref := layer.tensors.get(name)) is not None and shape in (None, ref.shape, ref.numel)
                    for name, shape in shapes.items()
                )
            ]
            if len(keys) > 1:
                raise UnsupportedError(
                    f"{file.name} could be the tied layer {' or '.join(keys)}: their parameters have the same names "
                    "and shapes. Save again with parameter names that differ between the tied layers"
                )
            if keys:
                prefixes[file.layer] = f"{TIED}{keys[0]}."
    return prefixes
