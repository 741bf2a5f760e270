"""The page of the matrices: each section is written by the tests that found what it says, and printed."""

from __future__ import annotations

from pathlib import Path

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "megatron-matrix.md"
_TITLE = """# Megatron and 3D parallelism: the matrix

`make integration` makes this page: every number was counted, and every "exact" was found, by that run.
"""
_NAMES = ("megatron", "eight-ranks", "deepspeed")


def write_section(name: str, text: str) -> None:
    """Replace the section `name` of the page by `text`, and print it. Others stay as they are."""
    sections = _sections(_PAGE.read_text() if _PAGE.exists() else "") | {name: text.strip()}
    parts = [f"{_mark(own)}\n{sections[own]}" for own in _NAMES if own in sections]
    _PAGE.write_text("\n\n".join([_TITLE.strip(), *parts]) + "\n")
    print(f"\n{text}")


def _sections(page: str) -> dict[str, str]:
    starts = sorted((page.index(_mark(name)), name) for name in _NAMES if _mark(name) in page)
    ends = [*[start for start, _ in starts], len(page)]
    return {
        name: page[start + len(_mark(name)) : end].strip() for (start, name), end in zip(starts, ends[1:], strict=True)
    }


def _mark(name: str) -> str:
    return f"<!-- {name} -->"
