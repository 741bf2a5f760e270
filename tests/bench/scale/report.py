"""What the index of a checkpoint costs, as a table (Markdown), data (JSON) and a plot (SVG)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

PAGE = "scale.md"
"""Page whose table is replaced."""

_COLOURS = {"ucp inspect": "#4878a8", "ucp plan": "#d0743c", "ucp convert --virtual": "#5a9e6f"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One command on one checkpoint."""

    series: str
    tensors: int
    """Tensors of its index: a weight, its master and two moments of each parameter."""
    ranks: int
    command: str
    source_bytes: int
    """Bytes of its files by their sizes; nearly all are holes."""
    seconds: float
    cpu_seconds: float
    peak_bytes: int


def write_report(folder: Path, rows: Sequence[Row], *, machine: str) -> None:
    """Write scale.json and scale.svg into `folder`, and the table between the marks of scale.md.

    Rows of an earlier run that are not measured again are kept.
    """
    day = datetime.now(UTC).date().isoformat()
    data = folder / "scale.json"
    before = [Row(**own) for own in json.loads(data.read_text())["rows"]] if data.exists() else []
    rows = sorted({_case(row): row for row in (*before, *rows)}.values(), key=_place)
    document = {"date": day, "machine": machine, "rows": [asdict(row) for row in rows]}
    data.write_text(json.dumps(document, indent=1) + "\n")
    page = folder / PAGE
    head, _, rest = page.read_text().partition(_BEGIN)
    tail = rest.partition(_END)[2]
    table = f"Measured on {day} ({machine}).\n\n{_table(rows)}"
    page.write_text(f"{head}{_BEGIN}\n{table}\n{_END}{tail}")
    _plot(folder / "scale.svg", rows)


def _case(row: Row) -> tuple[object, ...]:
    return row.series, row.tensors, row.ranks, row.command


def _place(row: Row) -> tuple[object, ...]:
    return row.series, row.tensors, row.ranks, [*_COLOURS].index(row.command)


_BEGIN, _END = "<!-- table: make bench-scale -->", "<!-- end -->"


def _table(rows: Sequence[Row]) -> str:
    lines = [
        "| source | tensors | ranks | TiB | command | CPU s | wall s | CPU ms per 1,000 tensors | peak MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.series} | {row.tensors:,} | {row.ranks:,} | {row.source_bytes / (1 << 40):.2f} | `{row.command}` | "
        f"{row.cpu_seconds:.1f} | {row.seconds:.1f} | {1e6 * row.cpu_seconds / row.tensors:.0f} | "
        f"{row.peak_bytes / 1e6:.0f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def _plot(path: Path, rows: Sequence[Row]) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(8.5, 6))
    by_tensors = [row for row in rows if row.series.startswith("Megatron")]
    others = [row for row in rows if row not in by_tensors]
    usual = min((row.tensors for row in others), default=0)
    by_ranks = [row for row in others if row.tensors == usual]
    for column, (own, unit, what) in enumerate(
        (
            (by_tensors, "tensors", "Megatron torch_dist, 1,024 ranks"),
            (by_ranks, "ranks", f"DeepSpeed, {usual:,} tensors"),
        )
    ):
        for line, (value, label) in enumerate((("cpu_seconds", "processor seconds"), ("peak_bytes", "peak MB"))):
            axis = axes[line][column]
            for command, colour in _COLOURS.items():
                points = [(getattr(row, unit), getattr(row, value)) for row in own if row.command == command]
                scale = 1e-6 if value == "peak_bytes" else 1
                axis.plot(
                    [x for x, _ in points], [y * scale for _, y in points], "o-", color=colour, label=command, ms=3
                )
            axis.set_xlabel(unit, fontsize=8)
            axis.set_ylabel(label, fontsize=8)
            axis.set_ylim(bottom=0)
            axis.set_xlim(left=0)
            axis.tick_params(labelsize=8)
            axis.spines[["top", "right"]].set_visible(False)
            if line == 0:
                axis.set_title(what, fontsize=9, loc="left")
    axes[0][0].legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
