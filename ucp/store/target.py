"""Writes atom stores: packs, encoded packs, one file per state, or only references.

    packed          packs/00000.safetensors, ...   1 GiB or more each, layer by layer, tensors named <parameter>/<state>
    per-parameter   atoms/<parameter>/<state>.safetensors          (the layout of the paper, section 3.1)
    virtual         no tensor files: the manifest refers to pieces of the source's files

Plain numbers, such as a step that the source keeps outside its tensors, are in the manifest in every layout.
With `compress`, packs hold encoded blocks (`ucp.io.elements`) and are named packs/00000.zst.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from urllib.parse import quote

from ucp.contract.output_names import check_named, check_text
from ucp.contract.plugins import producer
from ucp.contract.protocols import Target
from ucp.core.index import Extra, Index
from ucp.core.target import (
    Literal,
    OutputFile,
    Placement,
    RawCopy,
    Receipts,
    Slice,
    TargetOptions,
    TargetPlan,
    describe_casts,
    full_slice,
)
from ucp.core.topology import Topology
from ucp.errors import DestinationError, UsageError, format_count, format_list
from ucp.io.pickle.fields import describe_value
from ucp.io.provenance import identity_of, size_and_time
from ucp.io.safetensors import layout_safetensors
from ucp.io.torch_file.draft import make_torch_file
from ucp.store.describe import describe, is_inline
from ucp.store.manifest import EXTRAS, LONGEST, MANIFEST, StoredExtra, StoredFile, dump
from ucp.store.values import NotPlainError, is_plain, to_json

PACK = 1 << 30
"""Bytes of states at which a pack is closed."""

ENCODED_PACK = 256 << 20
"""Bytes of states at which an encoded pack is closed; one worker writes it from front to back."""

LAYOUTS = ("packed", "per-parameter", "virtual")


class StoreTarget(Target):
    """Writes atom stores."""

    name = "ucp"
    layouts = LAYOUTS
    takes_parts = True
    """A store of some of a model's parameters is useful; a framework needs all of them."""

    def plan(self, index: Index, topology: Topology | None, options: TargetOptions) -> TargetPlan:
        """Packs and extras. Raises UsageError for options that do not go together."""
        layout = options.layout or LAYOUTS[0]
        if topology is not None:
            raise UsageError(
                "atoms are rank-independent; --topology applies to other targets: drop it, or name a target with --to"
            )
        if options.compress and layout != "packed":
            raise UsageError(f"--compress needs the packed layout; got --layout {layout}")
        if layout == "virtual" and options.dtypes:
            raise UsageError("a virtual store only refers to the source's bytes, so --dtype cannot cast them: drop one")
        check_text((*index.atoms, *index.aliases, *(name for _, name, _ in index.states())))
        _check_groups(index)
        slices = [
            full_slice(atom.name, name, state, dtype=dtype)
            for atom, name, state in (() if layout == "virtual" else index.states())
            for dtype in (atom.dtype_of(name, options.dtypes),)
            if dtype is not state.dtype or not is_inline(state)
        ]
        files, placements = _compressed(slices) if options.compress else _safetensors(slices, layout=layout)
        extras = list(_layout_extras(index.extras))
        return TargetPlan(
            files=(*files, *(file for _, file, _ in extras)),
            placements=tuple(placements),
            raw=tuple(copy for _, _, copies in extras for copy in copies),
            casts=tuple(f"{line}, as requested" for line in describe_casts(index, slices)),
            compress=options.compress,
        )

    def seal(self, index: Index, plan: TargetPlan, receipts: Receipts) -> tuple[OutputFile, ...]:
        """The manifest."""
        virtual = not plan.placements and not all(is_inline(state) for _, _, state in index.states())
        written = {(r.placement.slice.param, r.placement.slice.state): r for r in receipts.placements}
        manifest = describe(
            index,
            producer=producer(),
            written=None if virtual else written,
            extras=[
                StoredExtra(
                    name=extra.name,
                    rank=extra.rank,
                    file=file.path,
                    nbytes=file.nbytes,
                    crc32=receipts.files[file.path],
                )
                for extra, file, _ in _layout_extras(index.extras)
            ],
            casts=plan.casts,
            identify=recogniser(index),
            headers={file.path: part.data for file in plan.files for part in file.literals if part.offset == 0},
        )
        text = dump(manifest)
        return (OutputFile(path=MANIFEST, nbytes=len(text), literals=(Literal(0, text),)),)


def _check_groups(index: Index) -> None:
    """Raise DestinationError for hyper-parameters that the manifest cannot hold."""
    wrong = [
        f"group {number}: {key}, which is {describe_value(value)}"
        for number, group in enumerate(index.groups)
        for key, value in group.hyper.items()
        if not is_plain(value)
    ]
    if wrong:
        raise DestinationError(
            "expected hyper-parameters that are plain values, which an atom store can hold; got\n"
            f"{format_list(wrong)}\nConvert directly to the framework's format (--to), which keeps them unchanged, "
            "or make them numbers and save again"
        )


def _packs(slices: Sequence[Slice], limit: int) -> Iterator[list[Slice]]:
    """Packs of neighbouring parameters; in a pack, wide dtypes come first, so that every tensor is aligned."""
    packs: list[list[Slice]] = []
    room = 0
    for slice_ in slices:
        starts_atom = not packs or packs[-1][-1].param != slice_.param
        if not packs or (starts_atom and room <= 0):
            packs.append([])
            room = limit
        packs[-1].append(slice_)
        room -= slice_.nbytes
    order = {state: n for n, state in enumerate(dict.fromkeys(slice_.state for slice_ in slices))}
    for pack in packs:
        yield sorted(pack, key=lambda slice_: (-slice_.dtype.itemsize, order[slice_.state]))


def _safetensors(slices: Sequence[Slice], *, layout: str) -> tuple[list[OutputFile], list[Placement]]:
    """Packs, or a file for each state."""
    if layout == "per-parameter":
        paths = [f"atoms/{_folder(slice_.param)}/{_folder(slice_.state)}.safetensors" for slice_ in slices]
        check_named(
            zip((slice_.param for slice_ in slices), paths, strict=True),
            expected="names that can be file names (atoms/<parameter>/<state>.safetensors, with characters other than "
            "letters, digits and _.-~ as %XX)",
            remedy="keep them in packs, which have no such limit: drop --layout per-parameter",
        )
        parts = [[slice_] for slice_ in slices]
    else:
        twice = [
            name for name, count in Counter(f"{slice_.param}/{slice_.state}" for slice_ in slices).items() if count > 1
        ]
        if twice:
            raise DestinationError(
                "expected a different name <parameter>/<state> for each tensor of a pack; several tensors share "
                f"{format_count(len(twice), 'name')}:\n{format_list(map(repr, twice))}\n"
                "Rename them in the model, or use --layout per-parameter or --compress, which allow such names"
            )
        parts = list(_packs(slices, PACK))
        paths = [f"packs/{number:05d}.safetensors" for number in range(len(parts))]
    files, placements = [], []
    for path, part in zip(paths, parts, strict=True):
        entries = [(f"{slice_.param}/{slice_.state}", slice_.dtype, slice_.local_shape) for slice_ in part]
        header = layout_safetensors(entries, metadata={"format": "pt", "producer": producer()})
        files.append(OutputFile(path=path, nbytes=header.nbytes, literals=(Literal(0, header.header),)))
        offsets = header.offsets.values()
        placements += [Placement(slice=slice_, path=path, offset=at) for slice_, at in zip(part, offsets, strict=True)]
    return files, placements


def _folder(name: str) -> str:
    """`name` as one component of a path."""
    return quote(name, safe="", errors="surrogatepass").replace("..", "%2E%2E") if name not in (".", "") else f"%{name}"


def _compressed(slices: Sequence[Slice]) -> tuple[list[OutputFile], list[Placement]]:
    files, placements = [], []
    for number, pack in enumerate(_packs(slices, ENCODED_PACK)):
        files.append(OutputFile(path=f"packs/{number:05d}.zst", nbytes=0))
        starts = accumulate((slice_.nbytes for slice_ in pack), initial=0)
        placements += [
            Placement(slice=slice_, path=files[-1].path, offset=at) for slice_, at in zip(pack, starts, strict=False)
        ]
    return files, placements


def _layout_extras(extras: Iterable[Extra]) -> Iterator[tuple[Extra, OutputFile, tuple[RawCopy, ...]]]:
    """Every extra with its file: JSON if the value is plain, else a file that torch.load restores it from."""
    for extra in extras:
        stem, text = extra_stem(extra.name, extra.rank), encode_extra(extra.value)
        if text:
            yield extra, OutputFile(path=f"{stem}.json", nbytes=len(text), literals=(Literal(0, text),)), ()
        else:
            yield extra, *make_torch_file(f"{stem}.pt", extra.value)


def extra_stem(name: str, rank: int | None) -> str:
    """Path of the file of an extra in its store, without the suffix.

    >>> extra_stem("lr_scheduler", None), extra_stem("rng_state", 3)
    ('extra/lr_scheduler', 'extra/rng_state@rank3')
    """
    return f"{EXTRAS}/{_folder(name)}{'' if rank is None else f'@rank{rank}'}"


def encode_extra(value: object) -> bytes:
    """The value of an extra as JSON; empty if it is not plain, or too long."""
    try:
        text = json.dumps(to_json(value), indent=1, ensure_ascii=False).encode() + b"\n"
    except (NotPlainError, UnicodeEncodeError):
        return b""
    return text if len(text) <= LONGEST else b""


def recogniser(index: Index) -> Callable[[str], StoredFile]:
    """A function from the path of a source file to what the store records of it: its state when `index` was read.

    For a file that is split in parts (the index lists only the parts), its present state is used.
    """
    files = {file.path: file for file in index.files}

    def identify(path: str) -> StoredFile:
        file = files.get(path)
        nbytes, mtime_ns = size_and_time(path) if file is None else (file.nbytes, file.mtime_ns)
        role = "split in parts" if file is None else file.role
        return StoredFile(path=path, nbytes=nbytes, mtime_ns=mtime_ns, identity=identity_of(path), role=role)

    return identify
