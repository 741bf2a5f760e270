"""Which layers each stage of the target has, where it has not as many stages as the source.

1. Take what the user says: `--set stages=` says all.
2. Else look for the `partition_method` under which DeepSpeed deals the source's layers out as they are, and deal them
   out over the target's stages by it. Of several, DeepSpeed's default comes first, and the others are named.
3. Say what was assumed. A run that deals its layers out otherwise has other parameters on its stages, whose optimizers
   cannot load these files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from math import prod

from ucp.atom import Kind
from ucp.errors import TopologyError, UsageError, listed
from ucp_formats.deepspeed.run_facts import RunFacts
from ucp_formats.deepspeed.source_stages import Pipeline, layer_of, stage_at, tied_key
from ucp_formats.deepspeed.stage_partition import balanced_bounds, uniform_bounds
from ucp_formats.deepspeed.stage_settings import Method, StageSettings
from ucp_formats.deepspeed.tied_uses import Uses, possible_uses

__all__ = ["Stages", "stages_of"]

_MOST_TRIED = 200
"""Possibilities for layers without a file to try."""
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
    if count == len(pipeline.stages) and settings.is_empty:
        return _as_they_are(facts, pipeline)
    disorder = pipeline.disorder(facts.index.groups)
    if disorder is not None:
        raise TopologyError(
            f"expected each stage's optimizer to have the parameters of a group in the order of their layers; "
            f"{facts.index.path} has {disorder[1]} after {disorder[0]}. How a run of other stages orders them is not "
            "recorded: write --to deepspeed-universal, which goes by names"
        )
    chooser = _Chooser(facts, pipeline, settings, count)
    bounds, uses, notes = chooser.chosen()
    places = list(chooser.places(bounds, uses))
    bare = [number for number, own in enumerate(places) if not own.keys() & chooser.numels.keys()]
    if bare and chooser.numels:
        raise TopologyError(
            f"expected trained parameters in each of {count} stages, as DeepSpeed makes no optimizer without; stages "
            f"{', '.join(map(str, bare))} of {_shown(bounds)} have none. Ask for fewer stages, or {_SAY}"
        )
    return Stages(places, (*notes, *_uneven_groups(facts, places)) if count > 1 else ())


def _uneven_groups(facts: RunFacts, places: Sequence[Mapping[str, int]]) -> Iterator[str]:
    """That stages have not as many groups each, where DeepSpeed cannot train so."""
    counts = [sum(any(name in own for name in group.params) for group in facts.index.groups) for own in places]
    zero = facts.stage > 0 and not facts.config.uses_bf16_optimizer(facts.precision)
    if zero and len(set(counts)) > 1:
        yield (
            f"the stages have parameters of {', '.join(map(str, counts))} groups of the optimizer: DeepSpeed 0.19.8 "
            "loads the files, but with ZeRO 1 waits for ever in the first step, whose norm is taken group by group "
            "over all stages. Other stages (--set stages=...) may have some of every group"
        )


def _as_they_are(facts: RunFacts, pipeline: Pipeline) -> Stages:
    owned = {name for names in pipeline.stages for name in names}
    places: list[dict[str, int]] = [{name: at for at, name in enumerate(names)} for names in pipeline.stages]
    for name in facts.index.atoms:
        for stage in () if name in owned else pipeline.stage_of(name):
            places[stage][name] = len(places[stage])
    return Stages(places)


class _Chooser:
    """Chooses bounds for one target."""

    def __init__(self, facts: RunFacts, pipeline: Pipeline, settings: StageSettings, count: int) -> None:
        self.facts = facts
        self.pipeline = pipeline
        self.settings = settings
        self.count = count
        atoms = facts.index.atoms.values()
        self.numels = {atom.name: prod(atom.global_shape) for atom in atoms if atom.kind is Kind.PARAMETER}
        self._check_layers()

    def chosen(self) -> tuple[Sequence[int], Uses, tuple[str, ...]]:
        """Bounds, uses of tied layers, and what is to be said of them."""
        said = self.settings.bounds
        layers = said[-1] if said else self.settings.layers
        possible = list(islice(possible_uses(self.pipeline, self.settings.tied, layers), _MOST_TRIED))
        if not possible:
            raise UsageError(
                f"expected more than {layers} layers in {self.facts.index.path}: a stage has a tied layer that none of "
                "the files is of (forward_fn), and that comes after them"
            )
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
        told = [f"{m} fits the source too: {_shown(own)}" for m, own in others.items() if list(own) != list(bounds)]
        return bounds, uses, self._notes(bounds, uses, why, told)

    def places(self, bounds: Sequence[int], uses: Uses) -> Iterator[Mapping[str, int]]:
        """Names of each stage, numbered by layer; tied layers come first, as a PipelineModule has them."""
        every = uses.every
        for stage in range(self.count):
            own: dict[str, int] = {}
            for name in self.facts.index.atoms:
                key, layer = tied_key(name), layer_of(name)
                layers = every.get(key, [0]) if key is not None else [layer or 0]
                here = [at for at in layers if stage_at(bounds, at) == stage]
                if here:
                    own[name] = here[0] if key is None else here[0] - uses.layers
            yield own

    def _fitting(self, possible: Sequence[Uses]) -> tuple[Uses, Sequence[Method]]:
        """The first possibility that explains the source, and the methods that then deal layers out as it has them.

        Where the user names a method, one that it explains comes first, if that takes no more uses in gaps.
        """
        explained: list[tuple[Uses, list[Method]]] = []
        for uses in possible:
            stages = len(self.pipeline.stages)
            tried = [method for method in Method if method is not Method.TYPE or self._matched()]
            found = [m for m in tried if self.pipeline.agrees(self._dealt(m, uses, stages), uses.every)]
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
        every = uses.every
        for name, numel in self.numels.items():
            key, layer = tied_key(name), layer_of(name)
            for at in every.get(key, []) if key is not None else [] if layer is None else [layer]:
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

    def _check_layers(self) -> None:
        """What the user says of layers fits the files."""
        own, wrong = self.settings, []
        said = own.bounds[-1] if own.bounds else own.layers
        least = max([self.pipeline.free, *(layer + 1 for layers in own.tied.values() for layer in layers)])
        if said is not None and said < least:
            wrong.append(f"{said} layers: there are layers up to number {least - 1}")
        if own.bounds is not None and len(own.bounds) != self.count + 1:
            wrong.append(f"stages: {len(own.bounds) - 1} of them for pp={self.count}")
        for key, layers in own.tied.items():
            if key not in self.pipeline.tied_stages:
                known = ", ".join(self.pipeline.tied_stages) or "none"
                wrong.append(f"tied={key}: trained tied layers of the source are {known}")
            wrong += [f"tied={key}:{layer}: this layer has a file" for layer in layers if layer in self.pipeline.layers]
        if own.method is Method.TYPE and own.matched and max(own.matched) >= (said or max(own.matched) + 1):
            wrong.append(f"type: layer {max(own.matched)} of {said}")
        if wrong:
            raise UsageError(f"--set does not fit the layers of {self.facts.index.path}:\n{listed(wrong)}")

    def _notes(self, bounds: Sequence[int], uses: Uses, why: str, others: Sequence[str]) -> tuple[str, ...]:
        hidden = [f"layer {layer} to use tied_modules.{key} again" for key, own in uses.hidden.items() for layer in own]
        taken = f" Taken, as no file says so: {', '.join(hidden)}." if hidden else ""
        told = "".join(f" {other}." for other in others)
        note = (
            f"the stages have {_shown(bounds)}, {why}.{told}{taken} Files do not record it, and a run that deals its "
            "layers out otherwise fails to load its optimizer: --set stages, partition, layers or tied say otherwise"
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


def _shown(bounds: Sequence[int]) -> str:
    """Layers of each stage, for a message."""
    spans = [range(start, stop) for start, stop in pairwise(bounds)]
    shown = (f"{own[0]}-{own[-1]}" if len(own) > 1 else str(own[0]) if own else "none" for own in spans)
    return f"layers {' | '.join(shown)} (stages={','.join(map(str, bounds))})"
