"""A folder with a delta: a Hugging Face folder whose index says `delta_encoding`, in the format of slime and SGLang.

* `model.safetensors.index.json`: `metadata` (version, base_version, delta_encoding, compression_format,
  checksum_format), and `weight_map` of the tensors that changed.
* Its safetensors files: for every such tensor one zstd frame (U8), and in `__metadata__` the checksum of its new bytes.
* `ucp-delta.json`, only where `ucp delta` wrote it: every tensor of the version, changed or not, with its checksum.
  Digests of this list, and of the one of the base, are in the metadata of the index.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from ucp.core.tensor import DType, TensorRef
from ucp.errors import MalformedError, MissingFileError, UnsupportedError, format_list
from ucp.io.files import open_source, read_object
from ucp.io.folder import to_absolute
from ucp.io.json_text import Natural, NotJson, decode
from ucp.io.pickle.fields import describe_value
from ucp.io.safetensors import read_header
from ucp.transfer.patches import OVERWRITE, XOR

INDEX = "model.safetensors.index.json"
LIST = "ucp-delta.json"
CODECS = {"xor": XOR, "overwrite": OVERWRITE}
"""Name of an encoding in an index to the codec of its patches."""
CHECKSUMS = ("adler32", "xxh3-128", "blake3")
"""Checksums that an index may name."""
DIGEST, BASE_DIGEST, BASE = "ucp_digest", "ucp_base_digest", "ucp_base"
"""Metadata of `ucp delta`: digest of the lists of tensors of version and base, and the path of a base elsewhere."""

_FOLDER = re.compile(r"weight_v(\d{6,18})")
_MOST_INDEX = 256 << 20


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor of a version."""

    name: str
    """Label: the name of a weight, or NAME/STATE."""
    dtype: DType
    """Type of its elements."""
    shape: tuple[Natural, ...]
    """Elements per dim."""
    checksum: str
    """xxh3-128 of its bytes."""


class TensorList(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`ucp-delta.json`."""

    version: int = 1
    """1."""
    step: int | None
    """Training step."""
    tensors: tuple[TensorEntry, ...]
    """Every tensor of the version."""
    frames: dict[str, Natural]
    """Label of a tensor to the CRC-32 of its frame."""
    base: dict[str, Natural]
    """Label of a tensor to the CRC-32 of its bytes in the base."""


def digest_tensors(tensors: Iterable[TensorEntry]) -> str:
    """xxh3-128 of a list of tensors, whatever their order."""
    digest = xxhash.xxh3_128()
    for entry in sorted(tensors, key=lambda entry: entry.name):
        digest.update(msgspec.json.encode(entry))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPatch:
    """The patch of one tensor."""

    frame: TensorRef
    """Its zstd frame, as bytes."""
    checksum: str
    """Checksum of the patched tensor, as "adler32:HEX"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A folder with patches."""

    folder: Path
    """Where it is."""
    version: str
    """Its version."""
    base_version: str
    """The version that it is a patch of."""
    codec: str
    """Codec of its patches."""
    patches: Mapping[str, StoredPatch]
    """Label of a tensor to its patch."""
    files: tuple[str, ...]
    """Its files."""
    base: str = ""
    """Path of the base, relative to the folder, if it is not a version beside it."""
    base_digest: str = ""
    """Digest of the base's tensors; empty if it is not recorded."""
    listed: TensorList | None = None
    """Every tensor of the version, if that is recorded."""


def plain_version(version: object) -> str:
    """A version as text, without leading zeros.

    >>> plain_version("000012"), plain_version(3), plain_version("rc-1")
    ('12', '3', 'rc-1')
    """
    text = str(version)
    return str(int(text)) if text.isascii() and text.isdigit() and len(text) < 19 else text


def name_folder(version: str) -> str:
    """Name of the folder of a version, as slime names it.

    >>> name_folder("12"), name_folder("rc-1")
    ('weight_v000012', 'rc-1')
    """
    return f"weight_v{int(version):06d}" if version.isascii() and version.isdigit() else version


def version_of_folder(name: str) -> str | None:
    """The version that the name of a folder states; None if it states none."""
    match = _FOLDER.fullmatch(name)
    return plain_version(match[1]) if match else None


def is_delta(folder: Path) -> bool:
    """Whether a folder has the index of a delta; its text is searched, not parsed."""
    if not (folder / INDEX).is_file():
        return False
    with open_source(str(folder / INDEX)) as file:
        return file.nbytes <= _MOST_INDEX and b'"delta_encoding"' in file.read(0, file.nbytes)


def read_delta(folder: Path) -> Delta:
    """The delta in `folder`. Raises SourceError."""
    path = to_absolute(folder / INDEX)
    document = read_object(path)
    metadata, places = document.get("metadata"), document.get("weight_map")
    if not isinstance(metadata, dict) or not isinstance(places, dict) or not all(map(_is_name, places.values())):
        raise MalformedError(
            f"expected metadata and weight_map of a delta in {path}; got {describe_value(metadata)} and "
            f"{describe_value(places)}. Copy the folder again"
        )
    for key, known in (("delta_encoding", CODECS), ("compression_format", ("zstd",)), ("checksum_format", CHECKSUMS)):
        if not isinstance(metadata.get(key), str) or metadata[key] not in known:
            raise UnsupportedError(
                f"expected {key} to be {' or '.join(known)} in {path}; got {describe_value(metadata.get(key))}"
            )
    absent = [key for key in ("version", "base_version") if not isinstance(metadata.get(key), str | int)]
    if absent:
        raise MalformedError(f"expected {' and '.join(absent)} in the metadata of {path}. Copy the folder again")
    version, named = plain_version(metadata["version"]), version_of_folder(Path(to_absolute(folder)).name)
    if named not in (None, version):
        raise MalformedError(f"expected version {named} in {folder}, by its name; its index says {version}")
    files = sorted(set(places.values()))
    return Delta(
        folder=folder,
        version=version,
        base_version=plain_version(metadata["base_version"]),
        codec=CODECS[metadata["delta_encoding"]],
        patches=_read_patches(folder, places, files, metadata["checksum_format"]),
        files=(INDEX, *files, *((LIST,) if DIGEST in metadata else ())),
        base=str(metadata.get(BASE, "")),
        base_digest=str(metadata.get(BASE_DIGEST, "")),
        listed=_read_list(folder, str(metadata[DIGEST])) if DIGEST in metadata else None,
    )


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value) and os.path.basename(value) == value


def _read_patches(
    folder: Path, places: Mapping[str, str], files: Iterable[str], checksum_format: str
) -> dict[str, StoredPatch]:
    """Patches of the files of a folder. Raises MissingFileError, MalformedError with all that is wrong."""
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise MissingFileError(f"expected these files in {folder}, as {INDEX} names them:\n{format_list(missing)}")
    patches: dict[str, StoredPatch] = {}
    wrong: list[str] = []
    for name in files:
        header = read_header(to_absolute(folder / name))
        for label, frame in header.tensors.items():
            checksum = header.metadata.get(label, "")
            if places.get(label) != name:
                wrong.append(f"{label}: in {name}; {INDEX} says {places.get(label, 'nothing of it')}")
            elif frame.dtype is not DType.UINT8 or len(frame.shape) != 1:
                wrong.append(f"{label}: {frame.dtype} {list(frame.shape)}, not the bytes of a patch")
            elif not re.fullmatch("[0-9a-fA-F]{1,64}", checksum):
                wrong.append(f"{label}: no checksum of {checksum_format} in the metadata of {name}")
            else:
                patches[label] = StoredPatch(frame=frame, checksum=f"{checksum_format}:{checksum}")
    wrong += [f"{label}: not in {name}" for label, name in places.items() if label not in patches and not wrong]
    if wrong:
        raise MalformedError(
            f"expected a patch and a checksum of every tensor that {folder / INDEX} names; got\n{format_list(wrong)}\n"
            "Copy the folder again"
        )
    return patches


def _read_list(folder: Path, digest: str) -> TensorList:
    """The tensors that `ucp delta` listed. Raises MalformedError if they do not have this digest."""
    path = folder / LIST
    with open_source(to_absolute(path)) as file:
        text = file.read(0, min(file.nbytes, _MOST_INDEX))
    try:
        listed = decode(text, TensorList)
    except NotJson as error:
        raise MalformedError(f"expected the tensors of a version in {path}; {error}. Copy the folder again") from error
    if digest_tensors(listed.tensors) != digest:
        raise MalformedError(
            f"expected the tensors in {path} to have the digest {digest}, as {INDEX} says; they do not"
        )
    return listed
