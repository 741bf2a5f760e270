"""The reference pages say what the program says."""

from __future__ import annotations

from pathlib import Path

from ucp.contract import plugins, registry
from ucp.source.run_state import RUN_SETTINGS
from ucp.source.selection import DROP, FROZEN
from ucp_cli.reference import page

DOCS = Path(__file__).parents[3] / "docs" / "reference"


def test_settings_that_targets_have_in_common_are_named() -> None:
    common = page().partition("## Settings")[2].partition("###")[0]
    assert all(f"`{name}=" in common for name in (DROP, FROZEN, *RUN_SETTINGS))
    targets = [registry.target(name) for name in plugins.names("ucp.targets")]
    assert f"({', '.join(sorted(target.name for target in targets if target.resumes))})" in common.replace("\n", " ")


def test_the_page_is_up_to_date() -> None:
    made = (DOCS / "cli.md").read_text()
    assert made == page(), "run: python -m ucp_cli.reference > docs/reference/cli.md"
