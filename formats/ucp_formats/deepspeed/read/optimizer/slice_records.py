"""`param_slice_mappings`, where it is the only record of names: BF16_Optimizer without ZeRO, as pipelines use it.

DeepSpeed records `param_shapes` under ZeRO only (`_common_checkpoint_state`, runtime/engine.py, 0.19.8). Each rank's
mapping lists, in the order of the buffer, how many elements of each parameter its share has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from ucp.core.pickle_values import Stub, TorchSize
from ucp.errors import MalformedError, listed
from ucp.io.pickle.fields import Shape
from ucp_formats.deepspeed.read.run import SavedRun

__all__ = ["recorded_numels", "with_shapes"]


def recorded_numels(run: SavedRun) -> list[dict[str, int]]:
    """Elements of every parameter of each group, in the order of its buffer, as the mappings of all ranks add up."""
    groups: list[dict[str, int]] = []
    for _, file in sorted(run.optimizers.items()):
        mappings = file.optimizer.get("param_slice_mappings")
        for number, own in enumerate(mappings if isinstance(mappings, list) else ()):
            if number == len(groups):
                groups.append({})
            for name, fragment in own.items() if isinstance(own, dict) else ():
                groups[number][str(name)] = groups[number].get(str(name), 0) + _numel(fragment)
    return groups


def _numel(fragment: object) -> int:
    """Elements of a `fragment_address`."""
    if not isinstance(fragment, Stub):
        return 0
    found = fragment.attribute("numel", fragment.args[0] if fragment.args else 0)
    return found if isinstance(found, int) else 0


def with_shapes(run: SavedRun, shapes: Mapping[str, Shape]) -> SavedRun:
    """The run with `param_shapes`, made from the mappings where it is not recorded; `shapes`: of the module's tensors.

    Raises MalformedError where the two do not agree.
    """
    if run.model.root.get("param_shapes") is not None or not run.optimizers:
        return run
    groups = recorded_numels(run)
    wrong = [
        f"{name}: {numel} elements, {list(shapes[name]) if name in shapes else 'no tensor'} in the module"
        for own in groups
        for name, numel in own.items()
        if name not in shapes or prod(shapes[name]) != numel
    ]
    if wrong or not groups:
        raise MalformedError(
            f"expected param_slice_mappings of the optimizer files of {run.model.path} to name the parameters of the "
            f"module, as param_shapes is not recorded; got\n{listed(wrong or ['none'])}\nfiles are missing, or are of "
            "another run"
        )
    made = [OrderedDict((name, TorchSize(shapes[name])) for name in own) for own in groups]
    model = replace(run.model, root={**run.model.root, "param_shapes": made})
    return replace(run, models={**run.models, 0: model})
