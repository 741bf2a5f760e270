"""`ucp inspect --param`: parameters one by one, down to where their bytes lie."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from ucp.atom import AtomIndex, Index, StateIndex
from ucp.fragment import Fragment
from ucp.tensor import TensorRef
from ucp_cli.overview import shown_path
from ucp_cli.render import facts, table
from ucp_cli.units import count_text, nbytes_text, shape_text

__all__ = ["detail"]

_COLUMNS = ("state", "elements", "dtype", "in file", ">at byte", ">bytes", "")


def detail(index: Index, atom: AtomIndex) -> RenderableType:
    """Facts of one parameter, and a row per piece of each of its states."""
    group = next((str(n) for n, group in enumerate(index.groups) if atom.name in group.params), "")
    tied = ", ".join(alias for alias, name in index.aliases.items() if name == atom.name)
    own = facts(
        [
            ("shape", shape_text(atom.global_shape)),
            ("kind", atom.kind.value),
            ("computes in", atom.model_dtype.value if atom.model_dtype else ""),
            ("laid out", ", ".join(f"{pattern} over {axis}" for axis, pattern in atom.patterns.items())),
            ("group", group),
            ("tied", tied),
            ("bytes", nbytes_text(atom.nbytes)),
        ]
    )
    rows = [row for name, state in atom.states.items() for row in _rows(index, name, state)]
    return Group(Text(f"\n{atom.name}", style="bold"), own, *filter(None, [table("", _COLUMNS, rows)]))


def _rows(index: Index, name: str, state: StateIndex) -> Iterator[tuple[str, ...]]:
    for fragment in state.fragments:
        yield (name, *_piece(index, fragment))
        name = ""


def _piece(index: Index, fragment: Fragment) -> tuple[str, ...]:
    ref = fragment.ref
    box = str(fragment.box) if fragment.box.sizes else "scalar"
    if not isinstance(ref, TensorRef):
        return box, ref.dtype.value, "(in the index)", "", count_text(ref.nbytes), _role(fragment)
    nbytes = ref.codec_nbytes if ref.codec else ref.nbytes
    words = [_role(fragment), "" if ref.is_contiguous else "strided", ref.codec]
    place = (shown_path(index, ref.path), count_text(ref.offset), count_text(nbytes))
    return box, ref.dtype.value, *place, ", ".join(filter(None, words))


def _role(fragment: Fragment) -> str:
    if fragment.replica:
        return f"copy {fragment.replica}"
    return f"term {fragment.term}" if fragment.term else ""
