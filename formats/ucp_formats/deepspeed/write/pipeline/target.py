"""The files of the layers of a pipeline: a state_dict each, for every tensor-parallel rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from ucp.contract.run_extras import MODULE_STATE
from ucp.core.names import WEIGHT
from ucp.io.torch_file.draft import Drafted
from ucp_formats.deepspeed.write.pipeline.layers import Pipeline
from ucp_formats.deepspeed.write.run import RunFacts, tag

__all__ = ["layer_files"]


def layer_files(facts: RunFacts, pipeline: Pipeline) -> Iterator[Drafted]:
    """Files of all layers; `facts`: of a tensor-parallel rank, with the parameters of all stages."""
    cut = f"-model_{facts.mp % facts.tp:02d}" if facts.tp > 1 else ""
    versions = facts.extras.mapping("module_metadata")
    for number, start in sorted(pipeline.layers.items()):
        draft = facts.draft(f"{tag(facts.index)}/layer_{number:02d}{cut}-model_states.pt")
        layer: OrderedDict[object, object] = OrderedDict()
        for name, atom in facts.index.atoms.items():
            if name.startswith(start):
                layer[name.removeprefix(start)] = draft.whole(name, WEIGHT, facts.module_dtype(atom))
        for name, value in facts.extras.below(MODULE_STATE):
            if name.startswith(start):
                layer[name.removeprefix(start)] = draft.carried(value)
        own = _versions(versions, start)
        if own:
            vars(layer)["_metadata"] = own
        yield draft.finish(layer)


def _versions(versions: Mapping[str, object], start: str) -> OrderedDict[object, object]:
    """Versions of the modules of a layer, which torch keeps as an attribute of its state_dict."""
    found: OrderedDict[object, object] = OrderedDict()
    for name, version in versions.items():
        if f"{name}.".startswith(start):
            found[f"{name}.".removeprefix(start).removesuffix(".")] = version
    return found
