"""Models in flat parameters: FSDP1's LOCAL_STATE_DICT, in which no parameter has a name or a shape of its own.

    _flat_param           parameters of the outermost module, end to end
    block._flat_param     those of `block`

Shapes and the order come from elsewhere: what the user points to (`--shapes-from`), or the optimizer beside, where it
was saved with names. Every flat parameter has to be as long as what it should hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ucp.core.tensor import TensorRef
from ucp.errors import IdleOptionError, UnsupportedError, UsageError, listed
from ucp_formats.torch.files.flat.lengths import Shapes, unflattened
from ucp_formats.torch.files.joined import Joined, join
from ucp_formats.torch.files.leaves import FLAT, Tree
from ucp_formats.torch.model_dict import bare_name
from ucp_formats.torch.state_dict import Leaf

__all__ = ["with_parameters"]


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
    units = _units(flat, known, where)
    root = next(iter(flat.values())).path[:-1]
    found: dict[str, Leaf] = {}
    for prefix, names in units.items():
        whole = Joined.of(flat[prefix])
        own = {name: known[name] for name in names}
        parts = unflattened(own, _shards(whole), numel=whole.shape[0], where=f"{where}: {prefix}{FLAT}")
        found |= {name: Leaf((*root, name), value.shape, value, value.form) for name, value in parts.items()}
    rest = [leaf for leaf in tree.model if leaf not in flat.values() and bare_name(str(leaf.path[-1])) not in found]
    return replace(tree, model=(*(found[name] for name in known if name in found), *map(_copies, rest)))


def _prefix(leaf: Leaf) -> str:
    """Name of the module of a flat parameter, with its dot; empty for the outermost."""
    module = str(leaf.path[-1]).removesuffix(FLAT).removesuffix(".")
    return bare_name(module) + "." if module and bare_name(module) else ""


def _shapes_of_states(tree: Tree) -> dict[str, tuple[int, ...]]:
    """Shapes of parameters in the order of the optimizer, which is theirs in a flat parameter; empty if it has none."""
    found: dict[str, tuple[int, ...]] = {}
    for leaf in tree.optimizer:
        match leaf.path, leaf.value:
            case (*_, "state", str(name), _), Joined(shape=shape, is_shared=True):
                found.setdefault(bare_name(name), shape)
    return found


def _in_order_of(tree: Tree, shapes: Shapes) -> Shapes:
    """`shapes` in the order of the model's own names: beside flat parameters there are some with `use_orig_params`.

    An optimizer has names in order without it, and sorted with it (torch 2.13, `_optim_utils.py`).
    """
    said = [name for leaf in tree.model if (name := bare_name(str(leaf.path[-1]))) in shapes]
    return {name: shapes[name] for name in said} if len(said) == len(shapes) else shapes


def _units(flat: Mapping[str, Leaf], shapes: Shapes, where: str) -> dict[str, list[str]]:
    """Module to the parameters in its flat one: those that no module further down holds."""
    units: dict[str, list[str]] = {prefix: [] for prefix in flat}
    strays = []
    for name in shapes:
        inside = [prefix for prefix in units if name.startswith(prefix)]
        if inside:
            units[max(inside, key=len)].append(name)
        else:
            strays.append(name)
    empty = [f"{prefix}{FLAT}" for prefix, names in units.items() if not names]
    if not shapes or empty:
        raise UnsupportedError(
            f"{where} was saved as FSDP1's LOCAL_STATE_DICT, which has neither names nor shapes of parameters; there "
            f"are none for\n{listed(empty or [prefix + FLAT for prefix in units])}\nPass --shapes-from: a checkpoint "
            "of the same model that has them, or a JSON file of name to shape in the order of model.named_parameters()"
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
    """A buffer, which every rank has whole."""
    if not isinstance(leaf.value, dict):
        return leaf
    joined = join(leaf.value, str(leaf.path[-1]))
    return Leaf(leaf.path, joined.shape, joined, joined.form)
