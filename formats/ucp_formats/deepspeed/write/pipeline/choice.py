"""Which layers each stage of the target has, where it has not as many stages as the source.

1. Take what the user says: `--set stages=` says all.
2. Else look for the `partition_method` under which DeepSpeed deals the source's layers out as they are, and deal them
   out over the target's stages by it. Of several, DeepSpeed's default comes first, and the others are named.
3. Say what was assumed. A run that deals its layers out otherwise has other parameters on its stages, whose optimizers
   cannot load these files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod

from ucp.core.index import Kind
from ucp.errors import TopologyError, UsageError, listed
from ucp_formats.deepspeed.write.pipeline.checks import check_settings
from ucp_formats.deepspeed.write.pipeline.layers import Pipeline, layer_of, stage_at, tied_key
from ucp_formats.deepspeed.write.pipeline.norms import Norms
from ucp_formats.deepspeed.write.pipeline.partition import balanced_bounds, uniform_bounds
from ucp_formats.deepspeed.write.pipeline.settings import Method, StageSettings
from ucp_formats.deepspeed.write.pipeline.tied_uses import Uses, possible_uses
from ucp_formats.deepspeed.write.pipeline.wording import layers_shown, numbers_shown
from ucp_formats.deepspeed.write.run import RunFacts

__all__ = ["Stages", "stages_of"]

_MOST_TRIED = 200
"""Possibilities for layers without a file to try."""
_NEAREST = 5
"""How far from the number of stages that was asked for others are looked for."""
_SAY = (
    "say how the run deals its layers out: --set stages=0,3,5,9 (the layer that each stage starts with, and the number "
    "of layers), or --set partition=parameters, uniform or type; or write --to deepspeed-universal, which loads at any "
    "number of stages"
)


@dataclass(frozen=True, slots=True)
class Stages:
    """What the stages of the target have."""

    places: Sequence[Mapping[str, int]]
    """Of each stage, its parameters and buffers; with numbers in the order in which its module has them."""
    notes: tuple[str, ...] = ()
    """What was assumed."""


def stages_of(facts: RunFacts, pipeline: Pipeline, settings: StageSettings, count: int) -> Stages:
    """Contents of `count` stages; `facts`: with the shapes that the first tensor-parallel rank has.

    Raises UsageError, and TopologyError where the source does not say enough or a stage comes out empty.
    """
    chooser = _Chooser(facts, pipeline, settings, count)
    if count == len(pipeline.stages) and not settings.deals:
        places: list[Mapping[str, int]] = [*_as_they_are(facts, pipeline)]
        return Stages(places, chooser.norm_notes(places))
    disorder = pipeline.disorder(facts.index.groups)
    if disorder is not None:
        raise TopologyError(
            f"expected each stage's optimizer to have the parameters of a group in the order of their layers; "
            f"{facts.index.path} has {disorder[1]} after {disorder[0]}. How a run of other stages orders them is not "
            "recorded: write --to deepspeed-universal, which goes by names"
        )
    bounds, uses, notes = chooser.chosen()
    places = chooser.places(bounds, uses)
    bare = chooser.bare(places)
    if bare:
        raise TopologyError(
            f"expected trained parameters in each of {count} stages, as DeepSpeed makes no optimizer without; "
            f"{'stages' if len(bare) > 1 else 'stage'} {numbers_shown(bare)} of {layers_shown(bounds)} "
            f"{'have' if len(bare) > 1 else 'has'} none. Ask for other stages:\n{listed(chooser.instead())}\nor {_SAY}"
        )
    return Stages(places, (*notes, *chooser.norm_notes(places)) if count > 1 else ())


def _as_they_are(facts: RunFacts, pipeline: Pipeline) -> list[dict[str, int]]:
    owned = {name for names in pipeline.stages for name in names}
    places: list[dict[str, int]] = [{name: at for at, name in enumerate(names)} for names in pipeline.stages]
    for name in facts.index.atoms:
        for stage in () if name in owned else pipeline.stage_of(name):
            places[stage][name] = len(places[stage])
    return places


class _Chooser:
    """Chooses bounds for one target."""

    def __init__(self, facts: RunFacts, pipeline: Pipeline, settings: StageSettings, count: int) -> None:
        self.facts = facts
        self.pipeline = pipeline
        self.settings = settings
        self.count = count
        atoms = facts.index.atoms.values()
        self.numels = {atom.name: prod(atom.global_shape) for atom in atoms if atom.kind is Kind.PARAMETER}
        check_settings(pipeline, settings, count, facts.index.path)

    def chosen(self) -> tuple[Sequence[int], Uses, tuple[str, ...]]:
        """Bounds, uses of tied layers, and what is to be said of them."""
        said = self.settings.bounds
        possible = self._possible()
        self._check_count(possible[0])
        if said is not None:
            return said, possible[0], self._notes(said, possible[0], "as --set stages says", ())
        asked = self.settings.method
        uses, fitting = self._fitting(possible)
        if not fitting and self.count > 1 and asked is None:
            raise TopologyError(self._unexplained())
        method = asked or next(iter(fitting), Method.UNIFORM)
        bounds = self._dealt(method, uses, self.count)
        why = f"as partition_method={method!s} of DeepSpeed 0.19.8 deals {uses.layers} layers out"
        if len(self.pipeline.stages) > 1:
            why += f", {'as it does' if method in fitting else 'though not as they are'} in the source"
        others = {other: self._dealt(other, uses, self.count) for other in fitting if asked is None}
        told = [
            f"{m} fits the source too: {layers_shown(own)}" for m, own in others.items() if list(own) != list(bounds)
        ]
        return bounds, uses, self._notes(bounds, uses, why, told)

    def bare(self, places: Iterable[Mapping[str, int]]) -> list[int]:
        """Stages without a trained parameter, where there are any trained ones."""
        return [number for number, own in enumerate(places) if self.numels and not own.keys() & self.numels.keys()]

    def norm_notes(self, places: Sequence[Mapping[str, int]]) -> tuple[str, ...]:
        """What is to be said of the first step. Raises TopologyError where DeepSpeed could not take it."""
        return tuple(Norms(self.facts).notes(places, lambda: list(self.instead()), anyway=self.settings.any_norm))

    def instead(self) -> Iterator[str]:
        """Stages to ask for where DeepSpeed could not train those asked for."""
        if self.pipeline.disorder(self.facts.index.groups) is not None:
            return
        norms = Norms(self.facts)
        uses, fitting = self._fitting(self._possible())

        def works(method: Method, count: int) -> bool:
            places = self.places(self._dealt(method, uses, count), uses)
            return not self.bare(places) and norms.fit(places)

        for method in self._methods():
            if works(method, self.count):
                shown = layers_shown(self._dealt(method, uses, self.count))
                yield f"--set partition={method!s}, for a run with that partition_method: {shown}"
        method = self.settings.method or next(iter(fitting), Method.PARAMETERS)
        found = bool(fitting) and not self.settings.deals  # so that it need not be said
        by = f" (partition={method!s})" if found else f" and --set partition={method!s}"
        fewer = [*range(self.count - 1, max(self.count - _NEAREST, 1), -1), 1]
        for near in (fewer, range(self.count + 1, self.count + _NEAREST)):
            count = next((count for count in near if count == 1 or works(method, count)), None)
            if count is not None:
                shown = layers_shown(self._dealt(method, uses, count))
                yield f"--topology with pp={count}{f'{by}: {shown}' if count > 1 else ''}"

    def _possible(self) -> Sequence[Uses]:
        """Where layers without a file can stand, the likeliest first."""
        layers = self.settings.bounds[-1] if self.settings.bounds else self.settings.layers
        possible = list(islice(possible_uses(self.pipeline, self.settings.tied, layers), _MOST_TRIED))
        if not possible:
            raise UsageError(
                f"expected more than {layers} layers in {self.facts.index.path}: a stage has a tied layer that none of "
                "the files is of (forward_fn), and that comes after them"
            )
        return possible

    def _check_count(self, uses: Uses) -> None:
        """Prove that there can be so many stages."""
        trained: set[int] = set()
        for name in self.numels:
            trained.update(self._layers_of(name, uses))
        if trained and self.count > len(trained):
            raise TopologyError(
                f"expected at most pp={len(trained)} for {self.facts.index.path}, whose layers with trained parameters "
                f"are {numbers_shown(trained)}; got pp={self.count}. DeepSpeed makes no optimizer for a stage without: "
                "ask for fewer stages"
            )

    def _layers_of(self, name: str, uses: Uses) -> Sequence[int]:
        """Layers that have a parameter."""
        key, layer = tied_key(name), layer_of(name)
        return uses.every.get(key, []) if key is not None else [] if layer is None else [layer]

    def _methods(self) -> list[Method]:
        """Methods under which it is known how layers are dealt out."""
        return [method for method in Method if method is not Method.TYPE or self._matched()]

    def places(self, bounds: Sequence[int], uses: Uses) -> list[Mapping[str, int]]:
        """Names of each stage, numbered by layer; tied layers come first, as a PipelineModule has them."""
        every = uses.every
        places: list[Mapping[str, int]] = []
        for stage in range(len(bounds) - 1):
            own: dict[str, int] = {}
            for name in self.facts.index.atoms:
                key, layer = tied_key(name), layer_of(name)
                layers = every.get(key, [0]) if key is not None else [layer or 0]
                here = [at for at in layers if stage_at(bounds, at) == stage]
                if here:
                    own[name] = here[0] if key is None else here[0] - uses.layers
            places.append(own)
        return places

    def _fitting(self, possible: Sequence[Uses]) -> tuple[Uses, Sequence[Method]]:
        """The first possibility that explains the source, and the methods that then deal layers out as it has them.

        Where the user names a method, one that it explains comes first, if that takes no more uses in gaps.
        """
        explained: list[tuple[Uses, list[Method]]] = []
        for uses in possible:
            stages = len(self.pipeline.stages)
            found = [m for m in self._methods() if self.pipeline.agrees(self._dealt(m, uses, stages), uses.every)]
            if found:
                explained.append((uses, found))
            if found and self.settings.method in (None, *found):
                break
        if not explained:
            return possible[0], []
        first, last = explained[0], explained[-1]
        asked = self.settings.method in last[1] and last[0].gaps(self.pipeline) == first[0].gaps(self.pipeline)
        return last if asked else first

    def _dealt(self, method: Method, uses: Uses, stages: int) -> Sequence[int]:
        if method is Method.UNIFORM:
            return uniform_bounds(uses.layers, stages)
        if method is Method.PARAMETERS:
            return balanced_bounds(self._weights(uses), stages)
        matched = self._matched()
        if not matched:
            raise UsageError(
                "expected one largest set of layers that are alike, in names and shapes of parameters, for --set "
                "partition=type; there are several. Write the numbers of the layers that the run's expression fits, "
                "like type:2-25"
            )
        return balanced_bounds([int(layer in matched) for layer in range(uses.layers)], stages)

    def _weights(self, uses: Uses) -> list[int]:
        """Trained elements of each layer, as `_count_layer_params` counts them: tied ones wherever they are used."""
        weights = [0] * uses.layers
        for name, numel in self.numels.items():
            for at in self._layers_of(name, uses):
                weights[at] += numel
        return weights

    def _matched(self) -> frozenset[int]:
        """Layers that `type:...` fits: told, or the largest set of alike ones; empty where there is no single one."""
        if self.settings.matched:
            return self.settings.matched
        sets: dict[tuple[tuple[str, tuple[int, ...]], ...], list[int]] = {}
        for layer, start in self.pipeline.layers.items():
            atoms = self.facts.index.atoms.values()
            own = [(a.name.removeprefix(start), a.global_shape) for a in atoms if a.name.startswith(start)]
            if own and tied_key(start) is None:
                sets.setdefault(tuple(sorted(own)), []).append(layer)
        by_length = sorted(sets.values(), key=len, reverse=True)
        if not by_length or (len(by_length) > 1 and len(by_length[0]) == len(by_length[1])):
            return frozenset()
        return frozenset(by_length[0])

    def _notes(self, bounds: Sequence[int], uses: Uses, why: str, others: Sequence[str]) -> tuple[str, ...]:
        hidden = [f"layer {layer} to use tied_modules.{key} again" for key, own in uses.hidden.items() for layer in own]
        taken = f" Taken, as no file says so: {', '.join(hidden)}." if hidden else ""
        told = "".join(f" {other}." for other in others)
        note = (
            f"the stages have {layers_shown(bounds)}, {why}.{told}{taken} Files do not record it, and a run that deals "
            "its layers out otherwise fails to load its optimizer: --set stages, partition, layers or tied say "
            "otherwise"
        )
        return (note,)

    def _unexplained(self) -> str:
        stages = [sorted({at for name in own if (at := layer_of(name)) is not None}) for own in self.pipeline.stages]
        shown = "; ".join(", ".join(map(str, own)) or "tied layers only" for own in stages)
        return (
            f"expected the stages of {self.facts.index.path} to be as partition_method parameters, uniform or type of "
            f"DeepSpeed 0.19.8 deals layers out; its optimizers have those of layers {shown}. For pp={self.count}, "
            f"{_SAY}"
        )
