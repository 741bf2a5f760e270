"""Writes a page as one file: template, style, program and data in it, nothing fetched from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ucp.core.text.page import Part, render_html
from ucp.errors import UsageError
from ucp.io.writing import replace_file

if TYPE_CHECKING:
    from ucp_cli.pages.web.contents import Contents


def check_page(path: Path) -> None:
    """Raise UsageError if `path` is no place for a page."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"expected a file name for the page that ends in .html; got {path}")
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise UsageError(f"expected a file in an existing folder for the page; got {path}")


def write_page(path: Path, contents: Contents) -> None:
    """Write the page to `path`, replacing one that is there."""
    replace_file(path, render(contents).encode())


def render(contents: Contents) -> str:
    """The page. Every text is escaped, and the browser runs no program but the one whose hash the page names."""
    from base64 import b64encode
    from hashlib import sha256
    from importlib.resources import files

    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    folder = files(__package__)
    style, program = (Markup((folder / f"page.{kind}").read_text("utf-8")) for kind in ("css", "js"))

    def to_html(part: Part) -> Markup:
        return Markup(render_html([part]))

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["html"] = to_html
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.from_string((folder / "page.html").read_text("utf-8")).render(
        contents=contents, style=style, program=program, hash=b64encode(sha256(program.encode()).digest()).decode()
    )
