"""What `ucp advise` says as a picture: the progress of every way of saving, as a range where inputs are ranges."""

from __future__ import annotations

from pathlib import Path

from ucp.advice.report import AdviceReport, describe_interval


def plot_advice(report: AdviceReport, path: Path) -> None:
    """Write the picture to `path`: a bar for each way that can be used, from its least progress to its most.

    A dot is what the simulation gave. `path`: as `ucp.moe.plot.check_plot` accepts it.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    usable = [advice for advice in report.methods if advice.low.ettr]
    figure, axes = plt.subplots(figsize=(9, 1.4 + 0.45 * len(usable)), layout="constrained")
    for row, advice in enumerate(usable):
        low, high = 100 * advice.low.ettr, 100 * advice.high.ettr
        axes.plot([low, high], [row, row], linewidth=9, solid_capstyle="butt", color="#9ecae1")
        axes.plot([low, high], [row, row], linestyle="none", marker="|", markersize=14, color="#08519c")
        if advice.replay is not None:
            axes.plot([100 * advice.replay.ettr], [row], marker="o", color="black")
    names = [f"{advice.method}\n{describe_interval(advice)}" for advice in usable]
    axes.set_yticks(range(len(usable)), names, fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel("progress, % of the time (dot: simulated)")
    axes.grid(axis="x", alpha=0.4)
    figure.savefig(path)
    plt.close(figure)
