"""The experts of a checkpoint as a picture: layers by experts, coloured by how much each is trained."""

from __future__ import annotations

from importlib.util import find_spec
from math import inf, isfinite, log2, nan
from pathlib import Path
from statistics import median

from ucp.errors import MissingLibraryError, UsageError
from ucp.moe.report import ExpertsReport

_FORMATS = (".svg", ".png", ".pdf")
_SCALE = 4
"""Colours range from 1/2^4 of the layer's median to 2^4 times the median."""


def check_plot(path: Path) -> None:
    """Raise UsageError if `path` cannot be written as a picture, MissingLibraryError without matplotlib."""
    if path.suffix.lower() not in _FORMATS:
        raise UsageError(f"expected a file name for the picture that ends in {', '.join(_FORMATS)}; got {path}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"expected an existing folder for the picture; got {path}")
    if find_spec("matplotlib") is None:
        raise MissingLibraryError(
            "expected matplotlib, which draws the picture; it is not installed. Install it "
            "(pip install 'universal-checkpoint[plot]')"
        )


def plot_experts(report: ExpertsReport, path: Path) -> None:
    """Write the picture to `path`: a row per layer, a column per expert.

    Grey: the checkpoint lacks the expert, or its number is not finite. Black: dead. Numbers of tokens and biases are
    not drawn; `--json` has them.
    """
    import matplotlib as mpl
    import numpy as np

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    width = max(layer.num_experts for layer in report.layers)
    values = np.full((len(report.layers), width), np.nan)
    for row, layer in enumerate(report.layers):
        middle = median(layer.finite_signal)
        for expert, signal in zip(layer.experts, layer.signal, strict=True):
            level = log2(signal) - log2(middle) if isfinite(signal) and signal > 0 < middle else -inf
            values[row, expert.number] = level if isfinite(signal) else nan
    colours = mpl.colormaps["RdYlBu_r"].with_extremes(under="black", bad="#d8d8d8")
    figure, axes = plt.subplots(
        figsize=(min(max(6.0, 2.5 + 0.28 * width), 24), min(max(3.6, 1.6 + 0.28 * len(report.layers)), 24)),
        layout="constrained",
    )
    image = axes.imshow(
        np.where(np.isfinite(values), values.clip(-_SCALE, _SCALE), values),
        cmap=colours, vmin=-_SCALE, vmax=_SCALE, aspect="auto", interpolation="nearest",
    )  # fmt: skip
    labels = [layer.module if layer.number is None else str(layer.number) for layer in report.layers]
    step = -(-len(labels) // 64)
    axes.set_yticks(range(0, len(labels), step), labels[::step])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    what = "mean squared gradient" if report.has_moments else "norm of the weights"
    bar = figure.colorbar(image, ax=axes, ticks=range(-_SCALE, _SCALE + 1, 2))
    bar.ax.set_yticklabels([f"{2.0**tick:g}" for tick in range(-_SCALE, _SCALE + 1, 2)])
    bar.set_label(f"{what} / median of the layer")
    axes.set_title(f"Experts{'' if report.step is None else f' at step {report.step:,}'}")
    figure.savefig(path)
    plt.close(figure)
