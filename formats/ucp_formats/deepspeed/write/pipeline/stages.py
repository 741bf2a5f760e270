"""Which layers each stage of the target has: those of the source's stage, or those that `--set` states.

The optimizer file of a stage holds the parameters of its layers, and DeepSpeed does not check names in it. So the files
must match how the run that loads them partitions its layers. No file records that, and nothing is inferred.

stages=0,3,5,9       the layer that each stage starts with, then the number of layers
partition=uniform    `partition_method` of the run: uniform, parameters, or type: with the numbers of the layers
                     that its expression matches (class names are in no file), like type:2-25,27
layers=9             for partition: the number of layers, where functions follow the last that has a file
tied=embed:8         a layer without a file (`forward_fn`) that uses a tied layer again
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf, prod

from ucp.core.index import Kind
from ucp.errors import TopologyError, UsageError, format_list
from ucp_formats.deepspeed.write.pipeline.layers import Pipeline, Uses, layer_of, stage_at, tied_key
from ucp_formats.deepspeed.write.run import RunFacts

_RANGES = r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*"
_FORMS = {
    "stages": (r"0(,\d{1,5})+", "the first layer of each stage, then the number of layers, increasing, like 0,3,5,9"),
    "partition": (
        rf"uniform|parameters|type:{_RANGES}",
        "uniform, parameters, or type: with the numbers of the layers that the expression matches, like type:2-25,27",
    ),
    "layers": (r"[1-9]\d{0,4}", "the number of layers"),
    "tied": (r"[^:,]+:\d{1,5}(,[^:,]+:\d{1,5})*", "key and number of the layer that uses it again, like embed:8"),
}
"""Setting to its form, and to that in words."""
SETTINGS = {name: words for name, (_, words) in _FORMS.items()}
"""Setting to its form in words."""
_STAGES = (
    "--set stages=FIRST,FIRST,...,COUNT (the first layer of each stage, then how many layers there are; PipelineModule "
    "prints them) or "
    "--set partition=uniform, parameters or type:FIRST-LAST (the run's partition_method)"
)
_TIED = "--set tied={}:N (the number of the layer without a file, a forward_fn, that uses the tied layer again)"
_ELSE = "or write --to deepspeed-universal, which loads at any number of stages"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """The settings; empty where the user states nothing."""

    bounds: tuple[int, ...] = ()
    """First layer of each stage, then the number of layers."""
    partition: str = ""
    """`partition_method`, as stated."""
    matched: frozenset[int] = frozenset()
    """Layers that the expression of `type:` matches."""
    layers: int = 0
    """Number of layers."""
    tied: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Key of a tied layer to the layers that use it again."""

    @property
    def partitions(self) -> bool:
        """Whether the user states which layers each stage has."""
        return bool(self.bounds or self.partition)


def parse_stage_settings(texts: Mapping[str, str]) -> StageSettings:
    """The parsed settings. Raises UsageError with all that are malformed.

    >>> parse_stage_settings({"partition": "uniform", "tied": "embed:8"}).tied
    {'embed': (8,)}
    """
    wrong = []
    for name, text in texts.items():
        form, words = _FORMS[name]
        spans = pairwise(re.findall(r"\d+", text) if name in ("stages", "partition") else ())
        if not (re.fullmatch(form, text) and all(int(low) < int(high) for low, high in spans)):
            wrong.append(f"{name}={text}: expected {words}")
    if texts and ("stages" in texts) == ("partition" in texts):
        wrong.append("say either stages or partition")
    if wrong:
        raise UsageError(
            f"the target deepspeed takes --set {', '.join(_FORMS)}, for the stages of a pipeline; "
            f"got\n{format_list(wrong)}"
        )
    tied: dict[str, tuple[int, ...]] = {}
    for part in filter(None, texts.get("tied", "").split(",")):
        key, _, layer = part.partition(":")
        tied[key] = (*tied.get(key, ()), int(layer))
    partition = texts.get("partition", "")
    return StageSettings(
        bounds=tuple(map(int, filter(None, texts.get("stages", "").split(",")))),
        partition=partition,
        matched=frozenset(_numbers(partition.partition(":")[2])),
        layers=int(texts.get("layers", 0)),
        tied=tied,
    )


def _numbers(text: str) -> list[int]:
    """Numbers and ranges.

    >>> _numbers("2-4,7")
    [2, 3, 4, 7]
    """
    spans = [part.partition("-") for part in text.split(",") if part]
    return [number for first, _, last in spans for number in range(int(first), int(last or first) + 1)]


@dataclass(frozen=True, slots=True)
class Stages:
    """Contents of the target's stages."""

    places: Sequence[Mapping[str, int]]
    """Per stage, its parameters and buffers, each with its position in the module."""
    notes: tuple[str, ...] = ()
    """Notes on them."""


def assign_stages(facts: RunFacts, pipeline: Pipeline, settings: StageSettings, count: int) -> Stages:
    """Contents of `count` stages; `facts`: with the shapes that the first tensor-parallel rank has.

    Raises TopologyError if the layers of the stages are unknown or DeepSpeed cannot have such stages, and UsageError.
    """
    if count == len(pipeline.stages) and not settings.partitions:
        owned = {name for names in pipeline.stages for name in names}
        places: list[dict[str, int]] = [{name: at for at, name in enumerate(names)} for names in pipeline.stages]
        for name in facts.index.atoms:
            for stage in () if name in owned else pipeline.stage_of(name):
                places[stage][name] = len(places[stage])
        return Stages(places)
    disorder = pipeline.find_disorder(facts.index.groups)
    if disorder is not None:
        raise TopologyError(
            f"expected each stage's optimizer to have the parameters of a group in the order of their layers; "
            f"{facts.index.path} has {disorder[1]} after {disorder[0]}. How a run of other stages orders them is not "
            "recorded: write --to deepspeed-universal, which goes by names"
        )
    uses = pipeline.tied_uses(settings.tied)
    layers = max(
        [1, settings.layers, max(pipeline.layers, default=-1) + 1, *(users[-1] + 1 for users in uses.values() if users)]
    )
    wrong = list(_find_misfits(pipeline, settings, layers, count))
    if wrong:
        raise UsageError(f"--set does not fit {facts.index.path}:\n{format_list(wrong)}")
    hidden = [key for key in pipeline.find_unknown_uses(settings.tied) if count > 1 or len(uses) > 1]
    lacking = [_STAGES] if count > 1 and not settings.partitions else []
    lacking += [_TIED.format(key) for key in hidden]
    if lacking:
        keys = ", ".join(f"tied_modules.{key}" for key in hidden)
        which = [*(["how a run partitions its layers"] if len(lacking) > len(hidden) else [])]
        which += [f"which layers use {keys} again"] if hidden else []
        raise TopologyError(
            f"expected the layers of each stage for pp={count}; {facts.index.path} is of pp={len(pipeline.stages)}, "
            f"and DeepSpeed does not record {', nor '.join(which)}: say {', and '.join(lacking)}; {_ELSE}"
        )
    bounds = settings.bounds or _partition_layers(facts, settings, uses, layers, count)
    note = _note(facts, pipeline, settings, uses, bounds)
    return Stages(_places(facts, uses, bounds), (note,) if count > 1 else ())


def _note(facts: RunFacts, pipeline: Pipeline, settings: StageSettings, uses: Uses, bounds: Sequence[int]) -> str:
    """A note on the stages, and whether the same partition gives the source's stages."""
    note = f"the stages have the layers of stages={','.join(map(str, bounds))}, as --set says"
    if settings.partition:
        note += f" with partition={settings.partition} for {bounds[-1]} layers"
        before = len(pipeline.stages)
        if before and not pipeline.has_stages(_partition_layers(facts, settings, uses, bounds[-1], before), uses):
            note += "; the source's stages do not follow from this partition: check partition, layers and tied"
    return f"{note}. A run that partitions its layers otherwise fails to load its optimizer"


def _find_misfits(pipeline: Pipeline, settings: StageSettings, layers: int, count: int) -> Iterator[str]:
    """Settings that do not fit the files, which have at least `layers` layers."""
    if settings.bounds and len(settings.bounds) != count + 1:
        yield f"stages: {len(settings.bounds) - 1} of them for pp={count}"
    stated = settings.bounds[-1] if settings.bounds else settings.layers
    if 0 < stated < layers:
        yield f"{stated} layers: there are layers up to number {layers - 1}"
    if settings.matched and max(settings.matched) >= layers:
        yield f"type: layer {max(settings.matched)} of {layers}; layers says how many there are"
    for key, layers_stated in settings.tied.items():
        if key not in pipeline.tied_uses({}):
            yield f"tied={key}: tied layers of the source are {', '.join(pipeline.tied_uses({})) or 'none'}"
        others = (at for at in layers_stated if at in pipeline.layers and tied_key(pipeline.layers[at]) != key)
        yield from (f"tied={key}:{at}: this layer has a file of its own" for at in others)


def _partition_layers(facts: RunFacts, settings: StageSettings, uses: Uses, layers: int, count: int) -> tuple[int, ...]:
    """Bounds as `PipelineModule._partition_layers` computes them."""
    if settings.matched:
        return balanced_bounds([int(layer in settings.matched) for layer in range(layers)], count)
    if settings.partition == "uniform":
        return uniform_bounds(layers, count)
    weights = [0] * layers
    for atom in facts.index.atoms.values():
        for layer in _layers_of(atom.name, uses) if atom.kind is Kind.PARAMETER else ():
            weights[layer] += prod(atom.global_shape)
    return balanced_bounds(weights, count)


def _layers_of(name: str, uses: Uses) -> Sequence[int]:
    key = tied_key(name)
    return (uses[key] or (0,)) if key is not None else (layer_of(name) or 0,)


def _places(facts: RunFacts, uses: Uses, bounds: Sequence[int]) -> list[Mapping[str, int]]:
    """Names of each stage, numbered by layer; tied layers come first, as in a PipelineModule."""
    places: list[dict[str, int]] = [{} for _ in bounds[1:]]
    trained = {atom.name for atom in facts.index.atoms.values() if atom.kind is Kind.PARAMETER}
    for name in facts.index.atoms:
        first = 0 if tied_key(name) is None else bounds[-1]
        for layer in _layers_of(name, uses):
            places[stage_at(bounds, layer)].setdefault(name, layer - first)
    untrained = [str(stage) for stage, names in enumerate(places) if trained and trained.isdisjoint(names)]
    if untrained:
        raise TopologyError(
            f"expected trained parameters on each stage, as DeepSpeed makes no optimizer without; of stages="
            f"{','.join(map(str, bounds))} none are on {', '.join(untrained)}. Choose other stages or fewer, {_ELSE}"
        )
    return [*places]


def uniform_bounds(layers: int, stages: int) -> tuple[int, ...]:
    """Bounds of stages of equal length, the first ones longer by one layer (`partition_uniform`, runtime/utils.py).

    Some stages are empty if there are fewer layers than stages.

    >>> uniform_bounds(8, 3)
    (0, 3, 6, 8)
    """
    if layers <= stages:
        return tuple(min(stage, layers) for stage in range(stages + 1))
    size, rest = divmod(layers, stages)
    return tuple(size * stage + min(stage, rest) for stage in range(stages + 1))


def balanced_bounds(weights: Sequence[int], stages: int) -> tuple[int, ...]:
    """Bounds with the least difference between heaviest and lightest stage (`partition_balanced`, ties included).

    `weights`: one per layer. Of several such bounds, the last stages take the fewest layers.

    >>> balanced_bounds([88, 72, 0, 16, 72, 88], 2)
    (0, 4, 6)
    """
    count = len(weights)
    if count <= stages:
        return uniform_bounds(count, stages)
    before = list(accumulate(weights, initial=0))
    best: dict[tuple[int, int], tuple[float, float, int]] = {(0, 0): (0, inf, 0)}  # heaviest, lightest, last start
    for stop in range(1, count + 1):
        for number in range(1, min(stop, stages) + 1):
            options = (
                (max(best[start, number - 1][0], weight), min(best[start, number - 1][1], weight), start)
                for start in reversed(range(stop))
                if (start, number - 1) in best
                for weight in [before[stop] - before[start]]
            )
            best[stop, number] = min(options, key=lambda option: option[0] - option[1])
    bounds = [count]
    for number in range(stages, 0, -1):
        bounds.append(best[bounds[-1], number][2])
    return tuple(reversed(bounds))
