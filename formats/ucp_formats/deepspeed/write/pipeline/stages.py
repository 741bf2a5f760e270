"""Which layers each stage of the target has: those of the source's stage, or those that `--set` states.

The optimizer file of a stage holds the parameters of its layers, and DeepSpeed does not check names in it. So the files
must match how the run that loads them partitions its layers. No file records that, and ucp does not guess it.

stages=0,3,5,9       the first layer of each stage, then the number of layers
partition=uniform    `partition_method` of the run: uniform, parameters, or type: followed by the numbers of the layers
                     that its expression matches (no file records class names), like type:2-25,27
layers=9             with partition: the number of layers, needed if functions follow the last layer with a file
tied=embed:8         a layer without a file (it has a `forward_fn`) that uses a tied layer again
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
"""Setting to the expression for its value, and to a description of the value."""
SETTINGS = {name: words for name, (_, words) in _FORMS.items()}
"""Setting to a description of its value."""
_STAGES = (
    "--set stages=FIRST,FIRST,...,COUNT (the first layer of each stage, then how many layers there are; PipelineModule "
    "prints them) or "
    "--set partition=uniform, parameters or type:FIRST-LAST (the run's partition_method)"
)
_TIED = "--set tied={}:N (the number of the layer without a file, a forward_fn, that uses the tied layer again)"
_ELSE = "or write --to deepspeed-universal, which loads with any number of stages"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """The parsed settings; a field is empty if the user does not state it."""

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
        """Whether the settings say which layers each stage has."""
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
        wrong.append("expected either stages or partition, not both or neither")
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
    """The numbers that a list of numbers and ranges stands for.

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
    """Notes on how the layers were assigned."""


def assign_stages(facts: RunFacts, pipeline: Pipeline, settings: StageSettings, count: int) -> Stages:
    """Contents of `count` stages; `facts`: view of the first tensor-parallel rank, with the parameters of all stages.

    Raises TopologyError if the layers of the stages are not known or a stage would train nothing, UsageError if the
    settings do not fit the source.
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
            f"expected the optimizer of each stage to have the parameters of a group in the order of their layers; "
            f"{facts.index.path} has {disorder[1]} after {disorder[0]}, so it is not known how a run with other stages "
            "orders them. Write --to deepspeed-universal, which is loaded by name"
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
            f"expected the layers of each stage for pp={count}; {facts.index.path} was saved with "
            f"pp={len(pipeline.stages)}, and DeepSpeed does not record {', nor '.join(which)}: state "
            f"{', and '.join(lacking)}; {_ELSE}"
        )
    bounds = settings.bounds or _partition_layers(facts, settings, uses, layers, count)
    note = _note(facts, pipeline, settings, uses, bounds)
    return Stages(_places(facts, uses, bounds), (note,) if count > 1 else ())


def _note(facts: RunFacts, pipeline: Pipeline, settings: StageSettings, uses: Uses, bounds: Sequence[int]) -> str:
    """A note on the stages, which warns if the same partition does not give the source's stages."""
    note = f"the pipeline stages have the layers of stages={','.join(map(str, bounds))}, as --set says"
    if settings.partition:
        note += f" with partition={settings.partition} for {bounds[-1]} layers"
        before = len(pipeline.stages)
        if before and not pipeline.has_stages(_partition_layers(facts, settings, uses, bounds[-1], before), uses):
            note += "; the source's stages do not follow from this partition: check partition, layers and tied"
    return f"{note}. A run that partitions its layers differently cannot load its optimizer"


def _find_misfits(pipeline: Pipeline, settings: StageSettings, layers: int, count: int) -> Iterator[str]:
    """A line for each setting that does not fit the source, which has at least `layers` layers, or `count` stages."""
    if settings.bounds and len(settings.bounds) != count + 1:
        yield f"stages: expected {count} stages for pp={count}; got {len(settings.bounds) - 1}"
    stated = settings.bounds[-1] if settings.bounds else settings.layers
    if 0 < stated < layers:
        yield f"expected at least {layers} layers, because the source has layer {layers - 1}; got {stated}"
    if settings.matched and max(settings.matched) >= layers:
        yield f"type: layer {max(settings.matched)} is not among the {layers} layers; if there are more, state layers"
    for key, layers_stated in settings.tied.items():
        if key not in pipeline.tied_uses({}):
            yield f"tied={key}: the tied layers of the source are {', '.join(pipeline.tied_uses({})) or 'none'}"
        others = (at for at in layers_stated if at in pipeline.layers and tied_key(pipeline.layers[at]) != key)
        yield from (f"tied={key}:{at}: this layer has a file, and is not tied by {key}" for at in others)


def _partition_layers(facts: RunFacts, settings: StageSettings, uses: Uses, layers: int, count: int) -> tuple[int, ...]:
    """The bounds that `PipelineModule._partition_layers` computes."""
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
    """Names of each stage, with numbers that order them as a PipelineModule does: tied layers, then by layer."""
    places: list[dict[str, int]] = [{} for _ in bounds[1:]]
    trained = {atom.name for atom in facts.index.atoms.values() if atom.kind is Kind.PARAMETER}
    for name in facts.index.atoms:
        first = 0 if tied_key(name) is None else bounds[-1]
        for layer in _layers_of(name, uses):
            places[stage_at(bounds, layer)].setdefault(name, layer - first)
    untrained = [str(stage) for stage, names in enumerate(places) if trained and trained.isdisjoint(names)]
    if untrained:
        raise TopologyError(
            f"expected trained parameters on each stage, without which DeepSpeed makes no optimizer; with stages="
            f"{','.join(map(str, bounds))} there are none on stage {', '.join(untrained)}. Choose other or fewer "
            f"stages, {_ELSE}"
        )
    return [*places]


def uniform_bounds(layers: int, stages: int) -> tuple[int, ...]:
    """Bounds of equally long stages; the first ones can have one layer more (`partition_uniform`, runtime/utils.py).

    Some stages are empty if there are fewer layers than stages.

    >>> uniform_bounds(8, 3)
    (0, 3, 6, 8)
    """
    if layers <= stages:
        return tuple(min(stage, layers) for stage in range(stages + 1))
    size, rest = divmod(layers, stages)
    return tuple(size * stage + min(stage, rest) for stage in range(stages + 1))


def balanced_bounds(weights: Sequence[int], stages: int) -> tuple[int, ...]:
    """Bounds with the least difference between the heaviest and the lightest stage (`partition_balanced`).

    `weights`: one per layer. If several bounds are as good, the last stages get the fewest layers, as in DeepSpeed.

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
