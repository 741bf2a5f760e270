"""Models in flat parameters: FSDP1's LOCAL_STATE_DICT, in which no parameter has a name or a shape of its own.

    _flat_param           parameters of the outermost module
    block._flat_param     those of `block`
    block.weight          the rank's part of a parameter in it, with one dim: with `use_orig_params`

Shapes and the order come from elsewhere: what the user points to (`--shapes-from`), or the optimizer beside, where it
was saved with names. Every flat parameter has to be as long as what it should hold (`lengths`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ucp.core.tensor import TensorRef
from ucp.errors import IdleOptionError, MalformedError, UnsupportedError, UsageError, listed
from ucp_formats.torch.files.flat.lengths import Shapes, join_parts, proves_parts, split_flat
from ucp_formats.torch.files.joined import Joined, join
from ucp_formats.torch.files.leaves import Ranked, Tree
from ucp_formats.torch.model_dict import FLAT, Path, bare_name
from ucp_formats.torch.state_dict import Leaf

_PASS_SHAPES = (
    "Pass --shapes-from: a checkpoint of the same model that has them, or a JSON file of name to shape in the order of "
    "model.named_parameters()"
)


def with_parameters(tree: Tree, shapes: Shapes | None, where: str) -> Tree:
    """`tree`, with parameters in place of flat ones.

    `shapes`: of all parameters in the order of the model, as the user gave them. Raises UnsupportedError without,
    UsageError where they are of another model, IdleOptionError where none are wanted.
    """
    flat = {_prefix(leaf): leaf for leaf in tree.model if str(leaf.path[-1]).endswith(FLAT)}
    if not flat:
        if shapes is not None:
            raise IdleOptionError(f"{where} has shapes of its own, which are taken: drop --shapes-from")
        return tree
    known = _in_order_of(tree, shapes if shapes is not None else _shapes_of_states(tree))
    beside: dict[str, Ranked] = {_name(leaf): leaf.value for leaf in tree.model if isinstance(leaf.value, dict)}
    full = {name for name, shape in known.items() if name in beside and _is_full(beside[name], shape)}
    units = _units(flat, known, full, where)
    ties = _ties(beside, known)
    _check_known({name: own for name, own in beside.items() if name not in known and name not in ties}, where)
    params = {name: join(beside[name], name) for name in known if name in full}
    for prefix, names in units.items():
        unit = {name: known[name] for name in names}
        parts = {name: beside[name] for name in names if name in beside}
        params |= _split(Joined.of(flat[prefix]), unit, parts, f"{where}: {prefix}{FLAT}")
    params = {name: params[ties.get(name, name)] for name in (*known, *ties)}
    root = next(iter(flat.values())).path[:-1]
    rest = [leaf for leaf in tree.model if leaf not in flat.values() and _name(leaf) not in params]
    model = (*(_leaf((*root, name), own) for name, own in params.items()), *map(_copies, rest))
    is_nameless = any(len(names) > 1 and beside.keys().isdisjoint(names) for names in units.values())
    return replace(tree, model=model, is_order_assumed=shapes is not None and is_nameless)


def _ties(beside: Mapping[str, Ranked], names: Collection[str]) -> dict[str, str]:
    """Further name of a parameter to the first: ranks saved the same elements under both."""
    firsts = {tuple(sorted(beside[name].items())): name for name in names if name in beside}
    return {
        name: firsts[key]
        for name, own in beside.items()
        if name not in names and (key := tuple(sorted(own.items()))) in firsts
    }


def _check_known(buffers: Mapping[str, Ranked], where: str) -> None:
    """Raise UnsupportedError for parts of parameters among what should be buffers, of which every rank has a copy."""
    parts = [name for name, own in buffers.items() if len({getattr(ref, "shape", None) for ref in own.values()}) > 1]
    if parts:
        raise UnsupportedError(
            f"{where} was saved as FSDP1's LOCAL_STATE_DICT; ranks have parts of these parameters, whose shapes are "
            f"not known (frozen ones are not in the optimizer):\n{listed(parts)}\n{_PASS_SHAPES}"
        )


def _split(flat: Joined, shapes: Shapes, parts: Mapping[str, Ranked], where: str) -> dict[str, Joined]:
    """The parameters in a flat one: from the parts that ranks saved under their names, or taken end to end."""
    copies = _shards(flat)
    if not parts:
        return split_flat(shapes, copies, numel=flat.shape[0], where=where)
    if absent := [name for name in shapes if name not in parts]:
        raise MalformedError(
            f"{where}: expected each of its parameters under its name too, as use_orig_params saves them; these are "
            f"not there:\n{listed(absent)}\nThe shapes are those of another model"
        )
    by_path = {
        name: {ref.path: ref for ref in own.values() if isinstance(ref, TensorRef)} for name, own in parts.items()
    }
    shards = {
        name: [[None if ref is None else own.get(ref.path) for ref in copy] for copy in copies]
        for name, own in by_path.items()
    }
    params = {name: join_parts(shape, shards[name], f"{name} in {where}") for name, shape in shapes.items()}
    widths = [[0 if ref is None else ref.numel for ref in shards[name][0]] for name in shapes]
    if not proves_parts(widths, flat.shape[0]):
        raise MalformedError(
            f"{where} has {flat.shape[0]} elements; the parts of its parameters that ranks saved beside it do not lie "
            f"in it one after another: {', '.join(shapes)}. Others are in it too (frozen ones are not in the "
            f"optimizer), or the files are of different steps. {_PASS_SHAPES}"
        )
    return params


def _is_full(values: Ranked, shape: tuple[int, ...]) -> bool:
    """Whether every rank saved a parameter of `shape` elements unsharded."""
    return all(isinstance(ref, TensorRef) and ref.shape == shape for ref in values.values())


def _leaf(path: Path, joined: Joined) -> Leaf:
    return Leaf(path, joined.shape, joined, joined.form, joined.storage, is_place=True)


def _name(leaf: Leaf) -> str:
    return bare_name(str(leaf.path[-1]))


def _prefix(leaf: Leaf) -> str:
    """Name of the module of a flat parameter, with its dot; empty for the outermost."""
    module = str(leaf.path[-1]).removesuffix(FLAT).removesuffix(".")
    return bare_name(module) + "." if module and bare_name(module) else ""


def _shapes_of_states(tree: Tree) -> dict[str, tuple[int, ...]]:
    """Shapes of parameters in the order of the optimizer, which is theirs in a flat parameter; empty if it has none."""
    found: dict[str, tuple[int, ...]] = {}
    for leaf in tree.optimizer:
        match leaf.path, leaf.value:
            case (*_, "state", str(name), _), Joined(shape=shape) if shape:
                found.setdefault(bare_name(name), shape)
    return found


def _in_order_of(tree: Tree, shapes: Shapes) -> Shapes:
    """`shapes` in the order of the model's own names: beside flat parameters there are some with `use_orig_params`.

    An optimizer has names in order without it, and sorted with it (torch 2.13, `_optim_utils.py`).
    """
    names = [name for leaf in tree.model if (name := _name(leaf)) in shapes]
    return {name: shapes[name] for name in names} if len(names) == len(shapes) else shapes


def _units(flat: Mapping[str, Leaf], shapes: Shapes, full: Collection[str], where: str) -> dict[str, list[str]]:
    """Module to the parameters in its flat one: those that no module further down holds.

    `full`: parameters that ranks saved unsharded, which FSDP was told to ignore.
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
            f"{where} was saved by FSDP1 between a forward pass and its backward pass: the parameters are not "
            f"sharded, and of the type in which the model computes:\n{listed(gathered)}\nSave after optimizer.step(), "
            "and evaluate under torch.no_grad()"
        )
    if not shapes or empty:
        raise UnsupportedError(
            f"{where} was saved as FSDP1's LOCAL_STATE_DICT, which has neither names nor shapes of parameters; there "
            f"are none for\n{listed(prefix + FLAT for prefix in empty or units)}\n{_PASS_SHAPES}"
        )
    if strays:
        raise UsageError(f"--shapes-from names parameters that {where} does not hold:\n{listed(strays)}")
    return units


def _shards(whole: Joined) -> list[list[TensorRef | None]]:
    """Stretches of a flat parameter in the order of the ranks, for each copy of it."""
    axis = whole.layout.axes[-1]
    share = -(-whole.shape[0] // axis.parts)
    copies: dict[int, list[TensorRef | None]] = {}
    for own in whole.fragments:
        shards = copies.setdefault(own.replica, [None] * axis.parts)
        shards[own.box.offsets[0] // share] = own.ref if isinstance(own.ref, TensorRef) else None
    return [copies[copy] for copy in sorted(copies)]


def _copies(leaf: Leaf) -> Leaf:
    """A buffer, of which every rank has a copy."""
    return _leaf(leaf.path, join(leaf.value, str(leaf.path[-1]))) if isinstance(leaf.value, dict) else leaf
