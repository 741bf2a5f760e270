"""`ucp inspect --param`: parameters one by one, down to where their bytes lie."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from ucp.core.fragments import Fragment
from ucp.core.index import AtomIndex, Index, StateIndex
from ucp.core.layout import Overlap
from ucp.core.tensor import TensorRef
from ucp.core.text.page import facts
from ucp.core.text.units import count_text, nbytes_text, shape_text
from ucp_cli.pages.overview import shown_path, stages
from ucp_cli.pages.render import heading, stacked, table

__all__ = ["detail"]

_COLUMNS = ("state", ">at byte", ">bytes", "of file")


def detail(index: Index, atom: AtomIndex) -> RenderableType:
    """Facts of one parameter, and a row per piece of each of its states."""
    group = next((str(n) for n, group in enumerate(index.groups) if atom.name in group.params), "")
    tied = ", ".join(alias for alias, name in index.aliases.items() if name == atom.name)
    own = facts(
        [
            ("shape", shape_text(atom.global_shape)),
            ("kind", atom.kind.value),
            ("computes in", atom.model_dtype.value if atom.model_dtype else ""),
            ("laid out", "; ".join(atom.layout.lines)),
            ("made of", "; ".join(f"{name} ({', '.join(own.lines)})" for name, own in atom.made_of.items())),
            ("stage", ", ".join(map(str, stages(atom)))),
            ("group", group),
            ("tied", tied),
            ("bytes", nbytes_text(atom.nbytes)),
        ]
    )
    rows = [row for name, state in atom.states.items() for row in _rows(index, atom, name, state)]
    return stacked(heading(atom.name), own, table("", _COLUMNS, rows))


def _rows(index: Index, atom: AtomIndex, name: str, state: StateIndex) -> Iterator[tuple[str, ...]]:
    """A row for the state, then one per piece."""
    rule = "" if state.overlap is Overlap.EXCLUSIVE else f", {state.overlap} of terms"
    has_shape = state.global_shape == atom.global_shape
    shape = "" if has_shape else f" {shape_text(state.global_shape)}"
    stored = f", stored as {'; '.join(state.layout.lines)}" if has_shape and state.layout is not None else ""
    yield f"{name} {state.dtype}{shape}{rule}{stored}", "", "", ""
    for fragment in state.fragments:
        yield (f"  {fragment.box}" if fragment.box.sizes else "  scalar", *_place(index, state, fragment))


def _place(index: Index, state: StateIndex, fragment: Fragment) -> tuple[str, str, str]:
    ref = fragment.ref
    words = [
        f"copy {fragment.replica}" if fragment.replica else "",
        f"term {fragment.term}" if fragment.term else "",
        ref.dtype.value if ref.dtype is not state.dtype else "",
    ]
    if not isinstance(ref, TensorRef):
        return "", count_text(ref.nbytes), " ".join(("(in the index)", *filter(None, words)))
    words += ["" if ref.is_contiguous else "strided", ref.codec]
    said = ", ".join(filter(None, words))
    path = shown_path(index, ref.path) + (f" ({said})" if said else "")
    return count_text(ref.offset), count_text(ref.codec_nbytes if ref.codec else ref.nbytes), path
