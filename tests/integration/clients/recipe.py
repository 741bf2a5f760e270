"""The code of docs/how-to/resume-in-a-client.md, as workers run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "resume-in-a-client.md"


def recipe(name: str, client: str) -> Any:
    """What the page defines as `name` in the section of a client."""
    section = next(own for own in _PAGE.read_text().split("\n## ") if own.startswith(client))
    code = section.split("```py\n", 1)[1].split("```", 1)[0]
    scope: dict[str, Any] = {}
    exec(compile(code, str(_PAGE), "exec"), scope)
    return scope[name]
