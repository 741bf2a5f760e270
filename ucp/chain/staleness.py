"""How much older than the others some parameters of a checkpoint are, and how many tokens experts lost by that.

PLT, the proportion of lost tokens (MoC-System eq. 7), is the share of a run's tokens whose updates the experts lack. A
checkpoint does not say how many tokens an expert got, so even routing is assumed: an expert whose states are from
iteration 900 of 1,000 lacks a tenth of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import mean

from ucp.core.index import Index
from ucp.errors import StaleError, format_count, format_list
from ucp.moe.layers import find_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """How much older than the newest link some parameters of a chain are."""

    iteration: int
    """Iteration of the newest link."""
    params: Mapping[int, tuple[str, ...]]
    """Iteration to the parameters whose states are from it, oldest first; without the newest iteration."""
    plt: float
    """Proportion of the run's tokens that experts lost, 0 to 1, if the router spreads tokens evenly (MoC-System eq. 7).

    The mean, over all experts, of the share of the run's iterations that their states lack.
    """


def measure_staleness(index: Index) -> Staleness:
    """How stale the parameters of `index` are, the index of a chain."""
    newest = index.step or 0
    stale: dict[int, list[str]] = {}
    for name, atom in index.atoms.items():
        if atom.iteration is not None and atom.iteration != newest:
            stale.setdefault(atom.iteration, []).append(name)
    shares = [
        mean(
            (newest - (newest if atom.iteration is None else atom.iteration)) / max(newest, 1)
            for tensors in layer.experts.values()
            for atom in (index.atoms[next(iter(tensors.values())).param],)
        )
        for layer in (find_layers(index.shapes) if stale else ())  # most checkpoints are of one iteration
    ]
    return Staleness(
        iteration=newest,
        params={iteration: tuple(names) for iteration, names in sorted(stale.items())},
        plt=mean(shares) if shares else 0.0,
    )


def map_experts(index: Index) -> dict[int, list[float]]:
    """Iteration to a list by expert: the share of layers, 0 to 1, in which the expert is from that iteration."""
    layers = find_layers(index.shapes)
    width = max((layer.num_experts for layer in layers), default=0)
    counts: dict[int, list[int]] = {}
    for layer in layers:
        for expert, tensors in layer.experts.items():
            atom = index.atoms[next(iter(tensors.values())).param]
            row = counts.setdefault(index.step or 0 if atom.iteration is None else atom.iteration, [0] * width)
            row[expert] += 1
    return {iteration: [count / len(layers) for count in counts[iteration]] for iteration in sorted(counts)}


def describe_staleness(staleness: Staleness) -> Iterator[str]:
    """A note that lists the stale parameters, if there are any."""
    if not staleness.params:
        return
    count = sum(map(len, staleness.params.values()))
    lines = [
        f"iteration {iteration:,}: {', '.join(names[:3])}{f' and {len(names) - 3:,} more' if len(names) > 3 else ''}"
        for iteration, names in staleness.params.items()
    ]
    lost = f"; experts lost {staleness.plt:.2%} of their tokens (PLT, for even routing)" if staleness.plt else ""
    yield (
        f"{format_count(count, 'parameter is', 'parameters are')} older than iteration {staleness.iteration:,}{lost}. "
        f"A run that resumes from them does not continue exactly:\n{format_list(lines)}"
    )


def describe_casts(index: Index) -> Iterator[str]:
    """A note on the parameters of which a link of a sparse window has only what the model computes with, if any."""
    if count := sum(atom.is_cast for atom in index.atoms.values()):
        of_params = format_count(count, "parameter has only the weight", "parameters have only the weights")
        yield (
            f"{of_params} with which the model computes: other iterations of the window have their full states. To a "
            "run that needs weights alone this is exact (--dtype weight=... casts all to one dtype); to resume, replay "
            "the window (ucp.densify)"
        )


def check_staleness(index: Index, *, exact: bool, max_plt: float | None) -> None:
    """Raise StaleError if parameters of a chain are older than the user allows."""
    if not exact and max_plt is None:
        return
    staleness = measure_staleness(index)
    notes = "".join(describe_staleness(staleness))
    if exact and staleness.params:
        raise StaleError(f"expected all states of {index.path} from one iteration (--exact); {notes}")
    if max_plt is not None and staleness.plt > max_plt:
        raise StaleError(
            f"expected the experts of {index.path} to lack at most {max_plt:.2%} of their tokens (--max-plt); {notes}"
        )
