"""What `ucp.experts` finds: how trained every expert is, which ones stand out in their layer, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, log2
from statistics import median

from ucp.contract.protocols import Observer
from ucp.core.index import STEP, WEIGHT, DoubtKind, Index
from ucp.core.text.page import Page, Report, facts, lines, table
from ucp.core.text.units import ranges_text
from ucp.errors import UsageError, format_count
from ucp.io.elements import viewed
from ucp.moe.faults import describe_unequal_counts, find_content_faults
from ucp.moe.layers import ExpertLayer, Role, find_layers
from ucp.moe.measure import MOMENT, Measure, measure
from ucp.transfer.probe import Prober

_FAR = 10
"""An expert is starved if its squared gradients are this many times below the median of its layer, hot if above."""

_MARKS = "▁▂▃▄▅▆▇█"
"""From 1/8 of the median or less to 8 times or more."""

_WIDEST = 64
"""Characters of the map of a layer, at most. With more experts than that, each shows the mean of several."""

_SHOWN = 128
"""Layers that a page shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertReport:
    """One expert."""

    number: int
    """Number in its layer."""
    numel: int
    """Elements of its weights."""
    weight_norm: float
    """Euclidean norm of its weights."""
    squared_gradient: float | None
    """Mean of `exp_avg_sq` over its weights, bias-corrected if the step is known; None without that state."""
    gradient_norm: float | None
    """Euclidean norm of `exp_avg`; None without that state."""
    router_norm: float | None
    """Euclidean norm of its row of the router; None if the router has no such row."""
    router_bias: float | None
    """Trained bias of its score."""
    balancing_bias: float | None
    """Bias that a rule moves: above 0 for an expert that got too few tokens, below for one that got too many."""
    tokens: float | None
    """Tokens that it got; None if the checkpoint does not count them."""
    step: int | None
    """Steps that the optimizer counted for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """The experts of one layer, ranked among themselves."""

    module: str
    """Path of the module that holds them."""
    number: int | None
    """Number of the layer; None if its path has none."""
    num_experts: int
    """Experts that it should have."""
    experts: tuple[ExpertReport, ...]
    """Experts in the checkpoint, in increasing number."""
    dead: tuple[int, ...]
    """Experts whose squared gradients are zero: no token was routed to them lately."""
    starved: tuple[int, ...]
    """Those with a tenth of the median of the layer or less."""
    hot: tuple[int, ...]
    """Those with ten times the median of the layer or more."""

    @property
    def signal(self) -> tuple[float, ...]:
        """The values that the map shows: squared gradients; norms of weights if an expert has no squared gradient."""
        if any(expert.squared_gradient is None for expert in self.experts):
            return tuple(expert.weight_norm for expert in self.experts)
        return tuple(expert.squared_gradient or 0.0 for expert in self.experts)

    @property
    def finite_signal(self) -> tuple[float, ...]:
        """`signal` without NaN and infinity; a zero where nothing else is left."""
        return tuple(filter(isfinite, self.signal)) or (0.0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsReport(Report):
    """The experts of a checkpoint."""

    path: str
    """Checkpoint."""
    step: int | None
    """Training step, where recorded."""
    layers: tuple[LayerReport, ...]
    """Layers with experts, in the order of the model."""
    problems: tuple[str, ...]
    """What is wrong."""
    notes: tuple[str, ...]
    """What you should know, but need not act on."""

    @property
    def has_moments(self) -> bool:
        """Whether every expert has squared gradients."""
        return all(expert.squared_gradient is not None for layer in self.layers for expert in layer.experts)

    def page(self) -> Page:
        """The map of experts, those that stand out, and what is wrong."""
        counts = dict.fromkeys(f"{layer.num_experts:,}" for layer in self.layers)
        signal = "mean squared gradient (exp_avg_sq)" if self.has_moments else "norm of the weights"
        step = "" if self.step is None else f", step {self.step}"
        yield f"{self.path}{step}"
        yield facts(
            [
                ("experts", f"{' or '.join(counts)} in each of {format_count(len(self.layers), 'layer')}"),
                (
                    "map",
                    f"{signal} relative to the layer's median: {_MARKS[0]} 1/8 or less, {_MARKS[-1]} 8 times or more",
                ),
            ]
        )
        columns = ("layer", "experts", ">lowest", ">median", ">highest", "stand out")
        yield table("Experts", columns, [_layer_row(layer) for layer in self.layers], most=_SHOWN, all_in="--json")
        yield lines("Problems", self.problems)
        yield lines("Notes", self.notes)


def _layer_row(layer: LayerReport) -> tuple[str, ...]:
    signal = layer.finite_signal
    chosen = {"dead": layer.dead, "starved": layer.starved, "hot": layer.hot}
    name = layer.module if layer.number is None else str(layer.number)
    return (
        name,
        "".join(_draw(layer)),
        *(f"{value:.3g}" for value in (min(signal), median(signal), max(signal))),
        "; ".join(f"{what}: {ranges_text(experts)}" for what, experts in chosen.items() if experts),
    )


def _draw(layer: LayerReport) -> Iterator[str]:
    """A mark for each expert, or for every few of them; × if all of these are dead, ! if one is not finite."""
    signal, middle = layer.signal, median(layer.finite_signal)
    width = -(-len(signal) // _WIDEST)
    for low in range(0, len(signal), width):
        mean = sum(signal[low : low + width]) / len(signal[low : low + width])
        if not isfinite(mean):
            yield "!"
        elif mean <= 0 or middle <= 0:
            yield "×" if mean <= 0 else _MARKS[-1]
        else:
            level = round((log2(mean) - log2(middle) + 3) / 6 * (len(_MARKS) - 1))
            yield _MARKS[min(max(level, 0), len(_MARKS) - 1)]


def check_experts(index: Index, observer: Observer, *, threads: int) -> tuple[list[str], list[str]]:
    """Read the experts, and return (faults, notes); both are empty for a model without experts."""
    layers = find_layers(index.shapes)
    faults, notes = find_content_faults(measure(index, layers, observer, threads=threads)) if layers else ([], [])
    return faults, [*notes, *filter(None, [describe_unequal_counts(layers)])]


def report_experts(index: Index, observer: Observer, *, threads: int) -> ExpertsReport:
    """What `ucp.experts` finds. Raises UsageError for a model without experts, SourceError, CorruptError."""
    layers = find_layers(index.shapes)
    if not layers:
        raise UsageError(
            f"expected a mixture-of-experts model; no parameter of {index.path} is named as an expert's "
            "(experts.0.w1, experts.gate_up_proj, local_experts.0.linear_fc1)"
        )
    measures = measure(index, layers, observer, threads=threads)
    faults, notes = find_content_faults(measures)
    structural = [doubt.text for doubt in index.doubts if doubt.kind is DoubtKind.EXPERTS]
    steps = _read_steps(index, layers)
    reports = tuple(_report_layer(index, layer, measures.get(layer.module, {}), steps) for layer in layers)
    is_mixed = any(atom.iteration not in (None, index.step) for atom in index.atoms.values())  # a chain: a note says so
    unequal_steps = () if is_mixed else _describe_unequal_steps(reports)
    return ExpertsReport(
        path=index.path,
        step=index.step,
        layers=reports,
        problems=(*structural, *faults),
        notes=tuple(filter(None, [*notes, describe_unequal_counts(layers), *unequal_steps])),
    )


def _report_layer(
    index: Index,
    layer: ExpertLayer,
    by_role: Mapping[Role, Mapping[int, Mapping[str, Measure]]],
    steps: Mapping[str, int],
) -> LayerReport:
    experts = []
    for number, tensors in layer.experts.items():
        states = by_role.get(Role.EXPERT, {}).get(number, {WEIGHT: Measure()})  # without elements, nothing is measured
        param = next(iter(tensors.values())).param
        values = {role: by_role.get(role, {}).get(number, {}).get(WEIGHT) for role in Role}
        totals = {role: None if value is None else value.total for role, value in values.items()}
        router, step = values[Role.ROUTER], steps.get(param)
        moment, momentum = states.get(MOMENT), states.get("exp_avg")
        experts.append(
            ExpertReport(
                number=number,
                numel=states[WEIGHT].numel,
                weight_norm=states[WEIGHT].norm,
                squared_gradient=None if moment is None else moment.mean / _find_bias(index, param, step),
                gradient_norm=None if momentum is None else momentum.norm,
                router_norm=None if router is None else router.norm,
                router_bias=totals[Role.ROUTER_BIAS],
                balancing_bias=totals[Role.BALANCE],
                tokens=totals[Role.TOKENS],
                step=step,
            )
        )
    squares = {e.number: e.squared_gradient for e in experts if e.squared_gradient is not None}
    squares = {number: square for number, square in squares.items() if isfinite(square)}
    middle = median(squares.values()) if squares else 0.0
    return LayerReport(
        module=layer.module,
        number=layer.number,
        num_experts=layer.num_experts,
        experts=tuple(experts),
        dead=tuple(number for number, square in squares.items() if square == 0),
        starved=tuple(number for number, square in squares.items() if 0 < square <= middle / _FAR),
        hot=tuple(number for number, square in squares.items() if square >= middle * _FAR > 0),
    )


def _find_bias(index: Index, param: str, step: int | None) -> float:
    """Adam's bias correction for the mean of squares: 1 - beta2^step; 1 if the step or beta2 is not known."""
    group = next((group for group in index.groups if param in group.params), None)
    betas = None if group is None else group.hyper.get("betas")
    if not step or not isinstance(betas, list | tuple) or len(betas) < 2 or not isinstance(betas[1], float):
        return 1.0
    return 1 - betas[1] ** step if 0 < betas[1] < 1 else 1.0


def _read_steps(index: Index, layers: Sequence[ExpertLayer]) -> dict[str, int]:
    """Name to step count, for the first parameter of every expert, if it has a step count."""
    steps = {}
    with Prober() as prober:
        for param in {next(iter(tensors.values())).param for layer in layers for tensors in layer.experts.values()}:
            state = index.atoms[param].states.get(STEP)
            if state is not None and state.numel == 1:
                ref = state.fragments[0].ref
                steps[param] = int(viewed(memoryview(prober.window(ref, 0, 1)), ref.dtype)[0])
    return steps


def _describe_unequal_steps(layers: Iterable[LayerReport]) -> Iterator[str]:
    """A note for each layer whose experts have different step counts."""
    for layer in layers:
        steps = {expert.step for expert in layer.experts if expert.step is not None}
        if len(steps) > 1:
            yield (
                f"{layer.module}: the optimizer stepped some experts {max(steps):,} times and others {min(steps):,}; "
                "it skips an expert without tokens if its gradient is None"
            )
