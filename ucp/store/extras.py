"""Extras as files: JSON where the value is plain, else a `torch.save` file that holds the same recipe.

Neither is ever executed: the second kind is written and read by our own pickle code (`ucp.io.emit`,
`ucp.io.unpickle`).
"""

from __future__ import annotations

import json

from ucp.errors import MalformedError
from ucp.io.archive import read_archive
from ucp.io.graft import torch_file
from ucp.io.json_text import NotJson, parsed
from ucp.io.source import open_source
from ucp.store.values import NotPlainError, from_json, to_json
from ucp.target import Literal, OutputFile, RawCopy
from ucp.tensor import Record

__all__ = ["extra_file", "read_extra"]


def extra_file(value: object, stem: str) -> tuple[OutputFile, tuple[RawCopy, ...]]:
    """The file `stem`.json or `stem`.pt that holds `value`, and the tensors to copy into it."""
    try:
        text = json.dumps(to_json(value), indent=1, ensure_ascii=False).encode() + b"\n"
    except (NotPlainError, UnicodeEncodeError):
        return torch_file(f"{stem}.pt", value)
    return OutputFile(path=f"{stem}.json", nbytes=len(text), literals=(Literal(0, text),)), ()


def read_extra(path: str) -> tuple[object, tuple[Record, ...]]:
    """The value that was stored, and the checksums of its tensors. Raises SourceError when the file is damaged."""
    if path.endswith(".pt"):
        archive = read_archive(path)
        return archive.root, archive.records
    with open_source(path) as file:
        text = file.read(0, file.nbytes)
    try:
        return from_json(parsed(text)), ()
    except NotJson as error:
        raise MalformedError(f"expected JSON in {path}; {error}. The file is damaged: copy it again") from error
    except (ValueError, RecursionError) as error:
        raise MalformedError(
            f"expected a value of ucp in {path}; {error}. The file is damaged: copy it again"
        ) from error
    except MalformedError as error:
        raise MalformedError(f"{path}: {error}. It is damaged; copy it again") from error
