"""The module of a pipeline, put together from the files of its layers.

`layer_03-...` holds the state_dict of layer 3, whose parameters are called `3.weight`, and so on. A layer that is tied
to another (TiedLayerSpec) is called by its key, `tied_modules.emb.weight`, which its file does not say: it is the key
whose parameters, by name and shape, are in the file. A tied layer with a `forward_fn` has no file
(runtime/pipe/module.py, 0.19.8), and one key can have files under several layers: these are copies.
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
    """Model states as they would be without layer files, for tensor-parallel rank `tp`.

    The first has every layer; the others have copies of tied ones. `trained`: parameters of the optimizers of all
    stages, with their shapes or numbers of elements where they are known.
    """
    stages = [run.model for run in grid.stages(tp).values()]
    starts = layer_starts(grid, tp, trained)
    modules: list[tuple[dict[str, TensorRef], dict[str, object]]] = []
    versions: dict[object, object] = {}
    for name, layer in grid.layers.items():
        if name.tp != tp:
            continue
        start = starts[name.layer]
        tensors = {f"{start}{own}": ref for own, ref in layer.tensors.items()}
        others = {f"{start}{own}": value for own, value in layer.others.items()}
        free = (one for one in modules if not (one[0].keys() | one[1].keys()) & (tensors.keys() | others.keys()))
        into = next(free, None)
        if into is None:
            modules.append(into := ({}, {}))
        into[0].update(tensors)
        into[1].update(others)
        prefix = start.removesuffix(".")
        versions |= {f"{prefix}.{key}" if key else prefix: own for key, own in (layer.versions or {}).items()}
    buffers = [stage.buffers for stage in stages if stage.buffers is not None]
    names = dict.fromkeys(name for own in buffers for name in own)
    bare = replace(  # the first stage, with what stages have a part of each
        stages[0],
        buffers=tuple(names) if len(buffers) == len(stages) else stages[0].buffers,
        frozen={name: shape for stage in stages for name, shape in stage.frozen.items()},
        fragments={name: ref for stage in stages for name, ref in stage.fragments.items()},
        shared={alias: name for stage in stages for alias, name in stage.shared.items()},
    )
    first, *copies = [SavedModule(tensors=tensors, others=others) for tensors, others in modules or [({}, {})]]
    return [replace(bare, module=own) for own in (replace(first, versions=versions or None), *copies)]


def layer_starts(grid: SavedGrid, tp: int, trained: Mapping[str, Shape | int | None]) -> dict[int, str]:
    """Layer to what the names of its parameters start with; for layers with a file."""
    known: dict[str, Shape | int | None] = dict(trained)
    for run in grid.stages(tp).values():
        known |= run.model.untrained
    numbers = {int(first) for name in known if (first := name.partition(".")[0]).isdigit()}
    tied: dict[str, dict[str, Shape | int | None]] = {}
    for name, shape in known.items():
        if name.startswith(TIED):
            key, _, below = name.removeprefix(TIED).partition(".")
            tied.setdefault(key, {})[below] = shape
    starts = {}
    for file, layer in grid.layers.items():
        if file.tp != tp:
            continue
        starts[file.layer] = f"{file.layer}."
        if file.layer not in numbers:  # a tied one: whose parameters, by name and shape, are in the file
            fitting = [
                key
                for key, shapes in tied.items()
                if all(
                    (ref := layer.tensors.get(name)) is not None and shape in (None, ref.shape, ref.numel)
                    for name, shape in shapes.items()
                )
            ]
            if len(fitting) > 1:
                raise UnsupportedError(
                    f"{file.name} could be the tied layer {' or '.join(fitting)}: their parameters have the same names "
                    "and shapes. Save again with names below the tied layers that differ"
                )
            if fitting:
                starts[file.layer] = f"{TIED}{fitting[0]}."
    return starts
