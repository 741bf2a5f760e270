"""The reference pages say what the program says."""

from __future__ import annotations

from pathlib import Path

from ucp_cli.reference import page

DOCS = Path(__file__).parents[3] / "docs" / "reference"


def test_the_page_is_up_to_date() -> None:
    made = (DOCS / "cli.md").read_text()
    assert made == page(), "run: python -m ucp_cli.reference > docs/reference/cli.md"
