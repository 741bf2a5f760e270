"""The order of an optimizer that numbers its parameters, as the user gives it.

    [["emb.weight", "fc.weight"], ["fc.bias"]]    a list for each group of the optimizer
    ["emb.weight", "fc.weight", "fc.bias"]        one list for all groups

Both are names of the model, in the order in which the script gave them to the optimizer.
"""

from __future__ import annotations

from pathlib import Path

from ucp.contract.protocols import ParamOrder
from ucp.errors import UsageError
from ucp.io.files import open_source
from ucp.io.json_text import NotJson, parsed
from ucp_formats.torch.model_dict import bare_name

__all__ = ["order_of"]

_EXPECTED = (
    '--param-order: expected a JSON list of names, or a list of such lists, such as [["emb.weight"], ["fc.bias"]]'
)


def order_of(asked: Path | ParamOrder | None) -> ParamOrder | None:
    """The names, read from a file where `asked` is one. Raises MissingFileError, UsageError."""
    groups = _read(asked) if isinstance(asked, Path) else asked
    return None if groups is None else tuple(tuple(map(bare_name, names)) for names in groups)


def _read(path: Path) -> ParamOrder:
    with open_source(str(path)) as file:
        data = file.read(0, file.nbytes)
    try:
        document = parsed(data)
    except NotJson as error:
        raise UsageError(f"{_EXPECTED}; {path} is no JSON: {error}") from error
    groups = [document] if _is_names(document) else document
    if not isinstance(groups, list) or not groups or not all(map(_is_names, groups)):
        raise UsageError(f"{_EXPECTED}; {path} holds another document")
    return tuple(map(tuple, groups))


def _is_names(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value)
