"""The benchmark's result as a table (Markdown), data (JSON) and a plot (SVG)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One command on one source in one place."""

    source: str
    medium: str
    command: str
    source_bytes: int
    seconds: float
    fastest: float
    slowest: float
    cpu_seconds: float
    peak_bytes: int
    """Largest memory of the process tree, over all runs."""


def write_report(folder: Path, rows: Sequence[Row], *, machine: str, sources: Mapping[str, str]) -> None:
    """Write convert.md, convert.json and convert.svg into `folder`, and print the table. `sources`: label to title."""
    folder.mkdir(parents=True, exist_ok=True)
    day = datetime.now(UTC).date().isoformat()
    document = {"date": day, "machine": machine, "rows": [asdict(row) for row in rows]}
    (folder / "convert.json").write_text(json.dumps(document, indent=1) + "\n")
    table = _table(rows)
    titles = "; ".join(f"{label} = {title}" for label, title in sources.items())
    print(table)
    (folder / "convert.md").write_text(
        f"# Converting, compared with `cp -r` and the tools of DeepSpeed, torch and accelerate\n\n"
        f"Measured by `make bench` on {day} ({machine}); "
        "medians of all runs. Times are of whole processes; the page cache holds the source. Memory is the largest sum "
        "of proportional set sizes over the process tree. `ucp convert` waits until everything is on the disk and "
        "`cp -r` does not. So on a disk compare `ucp convert` with `cp -r; sync`, and `ucp convert --no-fsync` with "
        "`cp -r`. In RAM `cp -r` and `cp -r; sync` do the same: their difference shows how much times vary.\n\n"
        f"Sources: {titles}.\n\n{table}\n![seconds per command](convert.svg)\n"
    )
    _plot(folder / "convert.svg", rows)


def _table(rows: Sequence[Row]) -> str:
    lines = [
        "| source | in | command | GB | seconds | range | vs `cp -r` | CPU s | peak MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        copied = [r.seconds for r in rows if (r.source, r.medium, r.command) == (row.source, row.medium, "cp -r")]
        ratio = f"{row.seconds / copied[0]:.2f}x" if copied else ""
        lines.append(
            f"| {row.source} | {row.medium} | `{row.command}` | {row.source_bytes / 1e9:.2f} | {row.seconds:.2f} | "
            f"{row.fastest:.2f}-{row.slowest:.2f} | {ratio} | {row.cpu_seconds:.2f} | "
            f"{row.peak_bytes / 1e6:.0f} |"
        )
    return "\n".join(lines) + "\n"


def _plot(path: Path, rows: Sequence[Row]) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    panels = list(dict.fromkeys((row.source, row.medium) for row in rows))
    figure, axes = plt.subplots(len(panels), 1, figsize=(8, 1.6 * len(panels) + 0.6), squeeze=False)
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        own = [row for row in rows if (row.source, row.medium) == panel]
        axis.barh([row.command for row in own][::-1], [row.seconds for row in own][::-1], color="#4878a8")
        for position, row in enumerate(own[::-1]):
            axis.text(row.seconds, position, f" {row.seconds:.2f} s", va="center", fontsize=8)
        axis.set_title(f"{panel[0]}, {panel[1]}", fontsize=9, loc="left")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("seconds, median", fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
