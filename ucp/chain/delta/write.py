"""`ucp delta`: write the second of two checkpoints as patches of the first, in the layout that slime and SGLang read.

1. Every state of both is read once, block by block; what differs is compressed as it is found, into files of threads.
2. The frames are copied into safetensors files; the list of all tensors and the index follow.
3. All of that is in a folder of another name, which is renamed when it is complete and on the disk.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
from zlib_ng import zlib_ng

from ucp.chain.delta.compare import BLOCK, Comparison, Frame, TensorPair
from ucp.chain.delta.document import (
    BASE,
    BASE_DIGEST,
    DIGEST,
    INDEX,
    LIST,
    TensorList,
    digest_tensors,
    is_delta,
    name_folder,
    read_delta,
    version_of_folder,
)
from ucp.contract.protocols import Observer
from ucp.core.index import WEIGHT, Index, StateIndex
from ucp.core.layout import Overlap
from ucp.core.slices import block_ranges
from ucp.core.tensor import DType
from ucp.core.text.page import Page, Report, facts, lines
from ucp.core.text.units import nbytes_text
from ucp.errors import DestinationError, MisfitError, UnsupportedError, UsageError, format_count, format_list
from ucp.io.folder import is_url, path_of, to_absolute
from ucp.io.provenance import check_unchanged
from ucp.io.safetensors import layout_safetensors
from ucp.io.writing import replace_file, sync

ENCODINGS = ("xor", "overwrite")
"""What a patch can be, the default first."""

_MOST_FILE = 4 << 30
"""Bytes of frames in a file, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaReport(Report):
    """A delta that was written."""

    path: str
    """Its folder."""
    version: str
    """Its version."""
    base: str
    """The checkpoint that it is a patch of."""
    base_version: str
    """Version of that."""
    encoding: str
    """"xor" or "overwrite"."""
    changed: int
    """Tensors that differ."""
    tensors: int
    """Tensors of the checkpoint: every state of every parameter."""
    nbytes: int
    """Bytes of all these tensors."""
    nbytes_written: int
    """Bytes of the patches."""
    notes: tuple[str, ...] = ()
    """What is not in it."""

    def page(self) -> Page:
        """What was written."""
        yield f"{self.path}: version {self.version}, a delta of {format_count(self.changed, 'tensor')}"
        yield facts(
            [
                ("base", f"{self.base}, version {self.base_version}"),
                ("of", f"{format_count(self.tensors, 'tensor')}, {nbytes_text(self.nbytes)}"),
                ("written", f"{nbytes_text(self.nbytes_written)}, {self.encoding}"),
            ]
        )
        yield lines("Notes", self.notes)


def write_delta(
    a: Index, b: Index, out: Path, *, encoding: str = ENCODINGS[0], threads: int, observer: Observer
) -> DeltaReport:
    """Write `b` as patches of `a` to the folder `out`. Raises UsageError, MisfitError, UnsupportedError, OSError."""
    if encoding not in ENCODINGS:
        raise UsageError(f"expected --encoding {' or '.join(ENCODINGS)}; got {encoding!r}")
    out = _check_place(out)
    version, base_version = _number_versions(a, out)
    jobs = _pair_tensors(a, b, encoding)
    growing = out.with_name(f".{out.name}.{os.getpid()}")
    growing.mkdir(parents=True)
    try:
        with ExitStack() as spools:
            comparison = Comparison(encoding, growing, spools, observer)
            comparison.run(jobs, threads)
            check_unchanged((*a.files, *b.files))
            metadata = {
                "version": version.zfill(6),
                "base_version": base_version.zfill(6),
                "delta_encoding": encoding,
                "compression_format": "zstd",
                "checksum_format": "xxh3-128",
                DIGEST: digest_tensors(comparison.entries["b"].values()),
                BASE_DIGEST: digest_tensors(comparison.entries["a"].values()),
            }
            if path_of(a.path) != out.parent / name_folder(base_version):
                metadata[BASE] = os.path.relpath(a.path, out) if not is_url(a.path) else a.path
            ordered = {job.label: comparison.frames[job.label] for job in jobs if job.label in comparison.frames}
            places, crcs = _write_files(growing, ordered)
        tensors = tuple(comparison.entries["b"][job.label] for job in jobs)
        listed = TensorList(step=b.step, tensors=tensors, frames=crcs, base=comparison.base_crcs)
        replace_file(growing / LIST, msgspec.json.encode(listed))
        text = json.dumps({"metadata": metadata, "weight_map": places}, indent=1, ensure_ascii=False)
        replace_file(growing / INDEX, text.encode("utf-8", "surrogateescape"))
        growing.rename(out)
        sync(out.parent)
    except BaseException:
        shutil.rmtree(growing, ignore_errors=True)
        raise
    return DeltaReport(
        path=str(out),
        version=version,
        base=a.path,
        base_version=base_version,
        encoding=encoding,
        changed=len(places),
        tensors=len(jobs),
        nbytes=b.nbytes,
        nbytes_written=sum(frame.nbytes for frame in comparison.frames.values()),
        notes=tuple(_list_left(a, b)),
    )


def _check_place(out: Path) -> Path:
    """The absolute folder to write. Raises UsageError, DestinationError."""
    if is_url(str(out)):
        raise UsageError(f"expected a folder on a disk for a delta; got {out}. Write it there, and upload the folder")
    out = Path(to_absolute(out))
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DestinationError(f"expected nothing at {out}, or an empty folder; remove it, or choose another version")
    return out


def _number_versions(a: Index, out: Path) -> tuple[str, str]:
    """The versions of the delta and of its base. Raises UsageError."""
    folder = path_of(a.path)
    base = read_delta(folder).version if is_delta(folder) else version_of_folder(folder.name) or "0"
    if not base.isdigit():
        raise UsageError(f"expected a base whose version is a number; {folder} is version {base}")
    version = version_of_folder(out.name) or str(int(base) + 1)
    if int(version) <= int(base):
        raise UsageError(f"expected a version after {base}, that of {folder}; got {version}: name --out weight_vNNNNNN")
    return version, base


def _pair_tensors(a: Index, b: Index, encoding: str) -> list[TensorPair]:
    """The states of both, by label. Raises MisfitError where they differ, UnsupportedError for what has no patch."""
    states_a, states_b = ({(atom.name, name): state for atom, name, state in index.states()} for index in (a, b))
    odd = [
        f"{'/'.join(key)}: {_describe(states_a.get(key))} and {_describe(states_b.get(key))}"
        for key in dict.fromkeys((*states_a, *states_b))
        if _describe(states_a.get(key)) != _describe(states_b.get(key))
    ]
    if odd:
        raise MisfitError(
            f"expected the same tensors in {a.path} and {b.path}; these differ:\n{format_list(odd)}\nConvert one of "
            "them first, so that names, states and dtypes are the same"
        )
    means = ["/".join(key) for key, state in states_a.items() if state.overlap is Overlap.MEAN]
    large = ["/".join(key) for key, state in states_a.items() if encoding == "overwrite" and state.nbytes >> 32]
    if means or large:
        raise UnsupportedError(
            f"expected tensors that can be patched in {a.path}; "
            + (
                f"these are means of several ranks: convert it first\n{format_list(means)}"
                if means
                else f"positions in these do not fit 32 bits: use --encoding xor\n{format_list(large)}"
            )
        )
    labels = {key: key[0] if key[1] == WEIGHT else "/".join(key) for key in states_b}
    if len(set(labels.values())) < len(labels):
        raise UnsupportedError(f"expected names of parameters in {b.path} that are not NAME/STATE of others")
    return [TensorPair(label, *key, states_a[key], states_b[key]) for key, label in labels.items()]


def _describe(state: StateIndex | None) -> str:
    return "nothing" if state is None else f"{state.dtype} {list(state.global_shape)}"


def _list_left(a: Index, b: Index) -> Iterator[str]:
    """What a delta does not hold."""
    others = [extra.name for extra in b.extras if not extra.is_sidecar]
    if others:
        yield f"a delta has tensors only: {format_count(len(others), 'other entry', 'other entries')} of {b.path} left"
    if a.groups != b.groups:
        yield "the hyper-parameters of the parameter groups differ, and are not in a delta: those of the base are read"


def _write_files(folder: Path, frames: dict[str, Frame]) -> tuple[dict[str, str], dict[str, int]]:
    """Copy the frames into safetensors files: label to file, and to the CRC-32 of the frame."""
    files: list[dict[str, Frame]] = []
    filled = _MOST_FILE
    for label, frame in frames.items():
        if filled >= _MOST_FILE:
            files.append({})
            filled = 0
        files[-1][label] = frame
        filled += frame.nbytes
    places: dict[str, str] = {}
    crcs: dict[str, int] = {}
    for number, group in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        crcs |= _write_file(folder / name, group)
        places |= dict.fromkeys(group, name)
    return places, crcs


def _write_file(path: Path, frames: dict[str, Frame]) -> dict[str, int]:
    """Write a safetensors file; label to the CRC-32 of its frame."""
    crcs = dict.fromkeys(frames, 0)
    entries = [(label, DType.UINT8, (frame.nbytes,)) for label, frame in frames.items()]
    layout = layout_safetensors(entries, metadata={label: frame.checksum for label, frame in frames.items()})
    with path.open("wb") as file:
        file.write(layout.header)
        for label, frame in frames.items():
            frame.file.seek(frame.offset)
            for low, high in block_ranges(0, frame.nbytes, BLOCK):
                data = frame.file.read(high - low)
                crcs[label] = zlib_ng.crc32(data, crcs[label])
                file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return crcs
