"""What the files of a pipeline record about its layers and stages; writes the layer files.

The source shows which layers have a file (modules do; functions and tied layers with a `forward_fn` do not), and which
trained parameters each stage's optimizer has. It does not show on which side of a stage boundary a layer without
parameters is, which layers without a file reuse a tied layer, nor how many functions follow the last layer with a file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ucp.contract.run_extras import MODULE_STATE
from ucp.core.index import WEIGHT, ParamGroup
from ucp.errors import UsageError
from ucp.io.torch_file.draft import FinishedFile
from ucp_formats.deepspeed.write.run import RunFacts, tag

PIPELINE = "pipeline"
"""Extra of a source that a pipeline saved; also the key by which ucp marks it in `optimizer_state.pt`."""

Uses = Mapping[str, Sequence[int]]
"""Key of a tied layer to the layers that use it."""

_TIED = "tied_modules."


def layer_of(name: str) -> int | None:
    """Number of the layer in a parameter's name; None for a tied layer."""
    first = name.partition(".")[0]
    return int(first) if first.isdecimal() else None


def tied_key(name: str) -> str | None:
    """Key of the tied layer that a parameter belongs to, or None.

    >>> tied_key("tied_modules.embed.word.weight")
    'embed'
    """
    return name.removeprefix(_TIED).partition(".")[0] if name.startswith(_TIED) else None


def is_pipeline(facts: RunFacts) -> bool:
    """Whether a DeepSpeed pipeline saved the source: it is recorded, and names are those of a PipelineModule.

    Names alone do not decide: an `nn.Sequential` names its parameters the same way.
    """
    recorded = facts.index.topology.pp > 1 or facts.extras.get(PIPELINE) is not None
    return recorded and _names_layers(facts.index.atoms)


def _names_layers(names: Iterable[str]) -> bool:
    return all(layer_of(name) is not None or tied_key(name) is not None for name in names)


def stage_at(bounds: Sequence[int], layer: int) -> int:
    """Number of the stage that has a layer; `bounds`: the first layer of each stage, then the number of layers."""
    return bisect_right(bounds, layer) - 1


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What a source records about its pipeline."""

    layers: Mapping[int, str]
    """Layer with a file to the prefix of its parameters' names."""
    stages: Sequence[Sequence[str]]
    """Trained parameters of each stage, as its optimizer has them."""

    @property
    def layer_stages(self) -> dict[int, int]:
        """Layer to its stage, for layers with trained parameters that are not tied."""
        owned = ((layer_of(name), stage) for stage, names in enumerate(self.stages) for name in names)
        return {layer: stage for layer, stage in owned if layer is not None}

    @property
    def tied_stages(self) -> dict[str, set[int]]:
        """Key of a tied layer to the stages that train its parameters."""
        stages_by_key: dict[str, set[int]] = {}
        for stage, names in enumerate(self.stages):
            for name in names:
                key = tied_key(name)
                if key is not None:
                    stages_by_key.setdefault(key, set()).add(stage)
        return stages_by_key

    def tied_uses(self, stated: Uses) -> Uses:
        """Key of a tied layer to the layers that use it, increasing: those with a file, and those in `stated`."""
        seen: dict[str, set[int]] = {key: set() for key in self.tied_stages}
        for layer, start in self.layers.items():
            key = tied_key(start)
            if key is not None:
                seen.setdefault(key, set()).add(layer)
        return {key: sorted({*layers, *stated.get(key, ())}) for key, layers in seen.items()}

    def find_unknown_uses(self, stated: Uses) -> list[str]:
        """Keys of tied layers that must have more uses than are known.

        A tied layer has a use on each stage that trains it, and at least two, unless the user `stated` its uses. A
        layer with a `forward_fn` can use a tied layer without having a file.
        """
        uses = self.tied_uses(stated).items()
        return [
            key
            for key, layers in uses
            if len(layers) < max(len(self.tied_stages.get(key, ())), 1 if key in stated else 2)
        ]

    def has_stages(self, bounds: Sequence[int], uses: Uses) -> bool:
        """Whether stages with these `bounds` have the same trained parameters as the source's stages."""
        if not any(self.stages):
            return True
        placed = {key: {stage_at(bounds, layer) for layer in layers} for key, layers in uses.items()}
        tied = all(placed.get(key, set()) == stages for key, stages in self.tied_stages.items())
        return tied and all(stage_at(bounds, layer) == stages for layer, stages in self.layer_stages.items())

    def find_disorder(self, groups: Sequence[ParamGroup]) -> tuple[str, str] | None:
        """Two parameters of one group and stage that are not in the order of the module; None if there are none.

        In a PipelineModule, tied layers come before all others, because it registers them first.
        """
        group_of = {name: number for number, group in enumerate(groups) for name in group.params}
        for names in self.stages:
            for number in range(len(groups)):
                members = [name for name in names if group_of.get(name) == number]
                for first, second in pairwise(members):
                    if _place(first) > _place(second):
                        return first, second
        return None

    def stage_of(self, name: str) -> set[int]:
        """Stages of a tensor that no optimizer has: the stage of the last trained layer up to its layer."""
        key = tied_key(name)
        if key is not None and key in self.tied_stages:
            return self.tied_stages[key]
        known = self.layer_stages
        before = [layer for layer in known if layer <= (layer_of(name) or 0)]
        return {known[max(before)] if before else 0}


def _place(name: str) -> int:
    layer = layer_of(name)
    return -1 if layer is None else layer


def infer_pipeline(facts: RunFacts, tied: Uses) -> Pipeline | None:
    """The pipeline that a source without stages becomes; None if its names are not those of a PipelineModule.

    `tied`: key of a tied layer to the layers that use it; the first of these has the file. Raises UsageError for a tied
    layer that `tied` does not have.
    """
    if not _names_layers(facts.index.atoms):
        return None
    layers = {layer: f"{layer}." for name in facts.index.atoms if (layer := layer_of(name)) is not None}
    keys = {key for name in facts.index.atoms if (key := tied_key(name)) is not None}
    unsaid = sorted(keys - tied.keys())
    if unsaid:
        example = ",".join(f"{key}:1,{key}:9" for key in unsaid)
        raise UsageError(f"expected the numbers of the layers that use {', '.join(unsaid)}, as in --set tied={example}")
    layers |= {uses[0]: f"{_TIED}{key}." for key, uses in tied.items() if key in keys}
    return Pipeline(dict(sorted(layers.items())), ())


def read_pipeline(facts: RunFacts) -> Pipeline | None:
    """The pipeline that saved the source; None if no pipeline did."""
    record = facts.extras.mapping(PIPELINE)
    layers, stages = record.get("layers"), record.get("stages")
    if not isinstance(layers, dict) or not isinstance(stages, list):
        return None
    return Pipeline({int(str(number)): str(start) for number, start in layers.items()}, stages)


def layer_files(facts: RunFacts, pipeline: Pipeline) -> Iterator[FinishedFile]:
    """A state_dict for each layer; `facts`: view of a tensor-parallel rank, with the parameters of all stages."""
    cut = f"-model_{facts.mp % facts.tp:02d}" if facts.tp > 1 else ""
    metadata = facts.extras.mapping("module_metadata")  # versions of modules, which torch keeps as an attribute
    for number, start in sorted(pipeline.layers.items()):
        draft = facts.draft(f"{tag(facts.index)}/layer_{number:02d}{cut}-model_states.pt")
        layer: OrderedDict[object, object] = OrderedDict()
        for name, atom in facts.index.atoms.items():
            if name.startswith(start):
                layer[name.removeprefix(start)] = draft.full(name, WEIGHT, facts.module_dtype(atom))
        for name, value in facts.extras.with_prefix(MODULE_STATE):
            if name.startswith(start):
                layer[name.removeprefix(start)] = draft.copy_extra(value)
        of_layer = {f"{name}.": version for name, version in metadata.items() if f"{name}.".startswith(start)}
        if of_layer:
            versions = ((name.removeprefix(start).removesuffix("."), version) for name, version in of_layer.items())
            vars(layer)["_metadata"] = OrderedDict(versions)
        yield draft.finish(layer)
