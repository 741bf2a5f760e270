"""Models in flat parameters: FSDP1's LOCAL_STATE_DICT, in which parameters have neither names nor shapes.

    _flat_param           parameters of the outermost module
    block._flat_param     those of `block`
    block.weight          with `use_orig_params`: the rank's part of a parameter of `block`, flattened

Shapes and their order come from what the user points to (`--shapes-from`), or from the optimizer beside the model, if
it was saved with names. Every flat parameter must be as long as the parameters in it, with padding if any (`lengths`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ucp.core.tensor import TensorRef
from ucp.errors import IdleOptionError, MalformedError, UnsupportedError, UsageError, format_list
from ucp_formats.torch.files.entries import RankValues, SavedEntries
from ucp_formats.torch.files.flat.lengths import FlatShards, Shapes, join_parts, proves_parts, split_flat
from ucp_formats.torch.files.global_tensor import GlobalTensor, join_ranks, tensor_entry
from ucp_formats.torch.state_dict.entries import StateEntry
from ucp_formats.torch.state_dict.model_dict import FLAT, bare_name

_PASS_SHAPES = (
    "Pass --shapes-from PATH: a checkpoint of the same model that records shapes, or a JSON file of name to shape in "
    "the order of model.named_parameters()"
)


def split_flat_params(saved: SavedEntries, shapes: Shapes | None, where: str) -> SavedEntries:
    """`saved`, with parameters in place of flat ones.

    `shapes`: of all parameters in the order of the model, if the user gave them. Raises UnsupportedError if shapes are
    not known, UsageError if they are from another model, IdleOptionError if they are not needed.
    """
    flat = {_prefix(entry): entry for entry in saved.model if str(entry.path[-1]).endswith(FLAT)}
    if not flat:
        if shapes is not None:
            raise IdleOptionError(f"{where} records the shapes itself: drop --shapes-from")
        return saved
    known = _sort_as_model(saved, shapes if shapes is not None else _shapes_of_states(saved))
    named: dict[str, RankValues] = {_name(entry): entry.value for entry in saved.model if isinstance(entry.value, dict)}
    full = {
        name
        for name, shape in known.items()
        if name in named and all(isinstance(ref, TensorRef) and ref.shape == shape for ref in named[name].values())
    }
    units = _units(flat, known, full, where)
    ties = _ties(named, known)
    _check_buffers({name: refs for name, refs in named.items() if name not in known and name not in ties}, where)
    params = {name: join_ranks(named[name], name) for name in known if name in full}
    for prefix, names in units.items():
        unit = {name: known[name] for name in names}
        parts = {name: named[name] for name in names if name in named}
        params |= _split_unit(GlobalTensor.of(flat[prefix]), unit, parts, f"{where}: {prefix}{FLAT}")
    params = {name: params[ties.get(name, name)] for name in (*known, *ties)}
    root = next(iter(flat.values())).path[:-1]
    model = [tensor_entry((*root, name), tensor) for name, tensor in params.items()]
    for entry in saved.model:
        if entry not in flat.values() and _name(entry) not in params:
            if isinstance(entry.value, dict):  # a buffer: every rank has a copy
                model.append(tensor_entry(entry.path, join_ranks(entry.value, str(entry.path[-1]))))
            else:
                model.append(entry)
    is_nameless = any(len(names) > 1 and named.keys().isdisjoint(names) for names in units.values())
    return replace(saved, model=tuple(model), is_order_assumed=shapes is not None and is_nameless)


def _ties(named: Mapping[str, RankValues], params: Collection[str]) -> dict[str, str]:
    """Second name of a parameter to its first: ranks saved the same elements under both."""
    firsts = {tuple(sorted(named[name].items())): name for name in params if name in named}
    keys = {name: tuple(sorted(refs.items())) for name, refs in named.items() if name not in params}
    return {name: firsts[key] for name, key in keys.items() if key in firsts}


def _check_buffers(buffers: Mapping[str, RankValues], where: str) -> None:
    """Raise UnsupportedError for tensors whose shapes differ between ranks: they are parts of parameters."""
    parts = [name for name, refs in buffers.items() if len({getattr(ref, "shape", None) for ref in refs.values()}) > 1]
    if parts:
        raise UnsupportedError(
            f"{where} was saved as FSDP1's LOCAL_STATE_DICT; each rank has a part of these parameters, whose shapes "
            f"are not known (the optimizer does not list frozen parameters):\n{format_list(parts)}\n{_PASS_SHAPES}"
        )


def _split_unit(
    flat: GlobalTensor, shapes: Shapes, parts: Mapping[str, RankValues], where: str
) -> dict[str, GlobalTensor]:
    """The parameters in a flat parameter: from parts that ranks saved under names; without these, by their lengths."""
    copies = _shards_by_copy(flat)
    if not parts:
        return split_flat(shapes, copies, numel=flat.shape[0], where=where)
    if absent := [name for name in shapes if name not in parts]:
        raise MalformedError(
            f"{where}: expected each of its parameters under its name too, as use_orig_params saves them; these are "
            f"not there:\n{format_list(absent)}\nThe shapes are those of another model"
        )
    shards: dict[str, FlatShards] = {}
    for name, refs in parts.items():
        by_file = {ref.path: ref for ref in refs.values() if isinstance(ref, TensorRef)}
        shards[name] = [[None if ref is None else by_file.get(ref.path) for ref in copy] for copy in copies]
    params = {name: join_parts(shape, shards[name], f"{name} in {where}") for name, shape in shapes.items()}
    widths = [[0 if ref is None else ref.numel for ref in shards[name][0]] for name in shapes]
    if not proves_parts(widths, flat.shape[0]):
        raise MalformedError(
            f"{where} has {flat.shape[0]} elements; the parts that ranks saved of these parameters do not fill it: "
            f"{', '.join(shapes)}. It holds other parameters too (the optimizer does not list frozen ones), or the "
            f"files are from different steps. {_PASS_SHAPES}"
        )
    return params


def _name(entry: StateEntry) -> str:
    return bare_name(str(entry.path[-1]))


def _prefix(entry: StateEntry) -> str:
    """Name of the module of a flat parameter, with its dot; empty for the outermost."""
    module = str(entry.path[-1]).removesuffix(FLAT).removesuffix(".")
    return bare_name(module) + "." if module and bare_name(module) else ""


def _shapes_of_states(saved: SavedEntries) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters whose states the optimizer saved under names, in its order; empty if it saved none."""
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in saved.optimizer:
        match entry.path, entry.value:
            case (*_, "state", str(name), _), GlobalTensor() as tensor if tensor.shape:
                shapes.setdefault(bare_name(name), tensor.shape)
    return shapes


def _sort_as_model(saved: SavedEntries, shapes: Shapes) -> Shapes:
    """`shapes` in the order of the names in the saved model, if it has all of them (`use_orig_params`).

    Without `use_orig_params` the optimizer has names in the order of the model; with it they are sorted alphabetically
    (torch 2.13, `_optim_utils.py`).
    """
    names = [name for entry in saved.model if (name := _name(entry)) in shapes]
    return {name: shapes[name] for name in names} if len(names) == len(shapes) else shapes


def _units(flat: Collection[str], shapes: Shapes, full: Collection[str], where: str) -> dict[str, list[str]]:
    """Module to the parameters in its flat parameter: those that no wrapped module inside it holds.

    `full`: parameters that every rank saved in full, because FSDP was told to ignore them.
    """
    units: dict[str, list[str]] = {prefix: [] for prefix in flat}
    unsharded: dict[str, list[str]] = {prefix: [] for prefix in flat}
    strays = []
    for name in shapes:
        prefix = max((prefix for prefix in units if name.startswith(prefix)), key=len, default=None)
        if prefix is not None:
            (unsharded if name in full else units)[prefix].append(name)
        elif name not in full:
            strays.append(name)
    empty = [prefix for prefix, names in units.items() if not names]
    gathered = [name for prefix in empty for name in unsharded[prefix]]
    if gathered:
        raise UnsupportedError(
            f"{where} was saved by FSDP1 between a forward pass and its backward pass, while these parameters "
            f"were gathered in the compute dtype:\n{format_list(gathered)}\nSave after "
            "optimizer.step(), and evaluate under torch.no_grad()"
        )
    if not shapes or empty:
        raise UnsupportedError(
            f"{where} was saved as FSDP1's LOCAL_STATE_DICT, which records neither names nor shapes of parameters; "
            f"no shapes are known for\n{format_list(prefix + FLAT for prefix in empty or units)}\n{_PASS_SHAPES}"
        )
    if strays:
        raise UsageError(f"--shapes-from names parameters that {where} does not hold:\n{format_list(strays)}")
    return units


def _shards_by_copy(flat: GlobalTensor) -> FlatShards:
    """Shards of a flat parameter in the order of the ranks, for each copy of it."""
    axis = flat.layout.axes[-1]
    share = -(-flat.shape[0] // axis.parts)
    copies: dict[int, list[TensorRef | None]] = {}
    for piece in flat.state.fragments:
        shards = copies.setdefault(piece.replica, [None] * axis.parts)
        shards[piece.box.offsets[0] // share] = piece.ref if isinstance(piece.ref, TensorRef) else None
    return [copies[copy] for copy in sorted(copies)]
