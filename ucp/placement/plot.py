"""A placement as a picture: experts by nodes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from ucp.placement.placement import Placement

_MOST_PANELS = 12
"""Layers that the picture shows."""


def plot_placement(placement: Placement, path: Path) -> None:
    """Write the picture to `path`: a panel per layer, a row per node, a column per expert, replicas as colour.

    Experts are in the order of their loads where these are known, the busiest first. With more than 12 layers, every
    n-th is drawn. `path`: as `ucp.moe.plot.check_plot` accepts it.
    """
    import matplotlib as mpl
    import numpy as np

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    layers = list(placement.layers)
    shown = layers[:: -(-len(layers) // _MOST_PANELS)]
    nodes = range(placement.cluster.nodes)
    most = max(max(Counter(placement.experts_of(layer=layer, node=node)).values()) for layer in shown for node in nodes)
    width = min(max(6.0, 2 + 0.1 * placement.num_experts(shown[0])), 24)
    height = max(1.6, 0.7 + 0.16 * placement.cluster.nodes)
    figure, panels = plt.subplots(
        len(shown), 1, figsize=(width, height * len(shown) + 0.6), squeeze=False, layout="constrained"
    )
    for axes, layer in zip(panels[:, 0], shown, strict=True):
        experts = list(range(placement.num_experts(layer)))
        if layer in placement.loads:
            experts.sort(key=lambda expert: (-placement.loads[layer][expert], expert))
        column = {expert: number for number, expert in enumerate(experts)}
        replicas = np.zeros((placement.cluster.nodes, len(experts)))
        for node in nodes:
            for expert in placement.experts_of(layer=layer, node=node):
                replicas[node, column[expert]] += 1
        image = axes.imshow(replicas, cmap="Blues", vmin=0, vmax=max(most, 2), aspect="auto", interpolation="nearest")
        axes.set_ylabel(f"layer {layer}\nnode")
        axes.set_yticks(range(0, placement.cluster.nodes, max(placement.cluster.nodes // 8, 1)))
        step = -(-len(experts) // 24)
        axes.set_xticks(range(0, len(experts), step), experts[::step])
    panels[-1, 0].set_xlabel("expert" + (", busiest first" if placement.loads else ""))
    figure.colorbar(image, ax=panels, label="replicas on the node", ticks=range(0, most + 1, -(-most // 12)))
    figure.savefig(path)
    plt.close(figure)
