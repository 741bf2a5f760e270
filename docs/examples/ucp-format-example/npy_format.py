"""Format `npy`: a .npy file per parameter and rank."""

import json

import numpy as np
from ucp_patterns.shard import Shard

from ucp.contract.locating import Located, Pointer, locate, require_checkpoint
from ucp.contract.protocols import Format
from ucp.core.index import AtomIndex, Index, Kind, StateIndex
from ucp.core.layout import AxisLayout, Layout, infer_global_shape
from ucp.core.tensor import DType, TensorRef, contiguous_strides
from ucp.core.topology import Topology
from ucp.core.union import StoredShard, place_fragments
from ucp.errors import MalformedError
from ucp.io.folder import to_absolute
from ucp.io.provenance import source_file

POINTERS = (Pointer("latest"),)


def look(path):
    """The checkpoint that a folder itself is."""
    if (path / "index.json").is_file() and (path / "rank-0").is_dir():
        return Located(root=path, content=None, reasons=("index.json", "rank-0/"))
    return None


class NpyFormat(Format):
    """Reads folders of .npy files."""

    name = "npy"

    def detect(self, path):
        """By what files the checkpoint at `path` is recognised; None if it is of another format."""
        located = locate(path, look, POINTERS)
        return None if located is None else located.evidence

    def read(self, path):
        """Index of the checkpoint at `path`: the headers of all files, no tensors."""
        located = require_checkpoint(
            locate(path, look, POINTERS), path, "a folder of .npy files", "one with index.json"
        )
        root = located.root
        index = parse_index(root / "index.json")
        ranks = [root / f"rank-{rank}" for rank in range(index["ranks"])]
        atoms = {name: read_atom(name, param["dim"], ranks) for name, param in index["params"].items()}
        paths = [root / "index.json", *(rank / f"{name}.npy" for rank in ranks for name in atoms)]
        return Index(
            path=to_absolute(root),
            format=self.name,
            evidence=located.reasons,
            producer="numpy",
            topology=Topology(tp=len(ranks)),
            step=index["step"],
            atoms=atoms,
            files=tuple(source_file(to_absolute(file), "weights") for file in paths),
        )


def parse_index(file):
    """What index.json says."""
    try:
        match json.loads(file.read_text()):
            case {"step": int(), "ranks": int(), "params": {}} as index:
                return index
    except ValueError as error:
        raise MalformedError(f"expected JSON in {file}; {error}. Copy the file again") from error
    raise MalformedError(f"expected step, ranks and params in {file}. Copy the file again")


def read_atom(name, dim, ranks):
    """A parameter, put together from the rows that ranks hold."""
    layout = Layout((AxisLayout("tp", len(ranks), Shard(dim), known_from="index.json"),))
    refs = [read_header(rank / f"{name}.npy") for rank in ranks]
    shape = infer_global_shape(layout, [ref.shape for ref in refs])
    stored = (StoredShard({"tp": rank}, ref) for rank, ref in enumerate(refs))
    weight = StateIndex(dtype=refs[0].dtype, global_shape=shape, fragments=place_fragments(layout, shape, stored))
    return AtomIndex(name=name, global_shape=shape, kind=Kind.PARAMETER, states={"weight": weight}, layout=layout)


def read_header(file):
    """Where the elements of a .npy file lie."""
    try:
        with file.open("rb") as opened:
            np.lib.format.read_magic(opened)
            shape, is_transposed, dtype = np.lib.format.read_array_header_1_0(opened)
            offset = opened.tell()
    except (OSError, ValueError) as error:
        raise MalformedError(f"expected a .npy file at {file}; {error}. Copy it again") from error
    if is_transposed or not dtype.isnative:
        raise MalformedError(f"expected rows in the order and bytes of this machine in {file}; got {dtype}")
    strides = contiguous_strides(shape)
    return TensorRef(path=to_absolute(file), offset=offset, dtype=DType(dtype.name), shape=shape, strides=strides)
