"""What the parts of a state dict are to an index: kinds, numbers, and the keys that were saved.

`--to dcp --set style=source` writes under these keys again.

>>> from ucp_formats.torch.state_dict import Leaf
>>> step = Leaf(("app", "opt", "state", "0", "step"), ())
>>> weight = Leaf(("app", "model", "_orig_mod.w"), (2,))
>>> parts = Parts(root=("app", "model"), model={"w": weight}, states={"w": {"step": step}})
>>> parts.groups = (ParamGroup(params=("w",), hyper={}),)
>>> keys = find_keys([("app", "opt", "param_groups", 0, "lr")], parts)
>>> keys.model, keys.params
(('app', 'model'), {'w': '_orig_mod.w'})
>>> keys.optimizers
(OptimizerKeys(root=('app', 'opt'), is_flat=False, groups=(0,), params={'w': 0}),)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ucp.core.index import WEIGHT, AtomIndex, Kind, OptimizerKeys, ParamGroup, StateDictKeys, StateIndex
from ucp.core.tensor import TensorRef
from ucp.core.union import state_from_scalar
from ucp.errors import UnsupportedError, listed
from ucp.io.pickle.fields import described
from ucp_formats.torch.model_dict import Path
from ucp_formats.torch.state_dict import Leaf, Parts, optimizer_root, show_path

_STATE = "state"


def kind_of(name: str, parts: Parts) -> Kind | None:
    """What a tensor of the model is to the optimizer; None where it is in no group.

    What has no states where others have theirs was not stepped: a frozen parameter, which `AdamW(model.parameters())`
    lists too.
    """
    return Kind.FROZEN if name in parts.frozen else Kind.PARAMETER if name in parts.trained else None


def untrained_notes(atoms: Mapping[str, AtomIndex], parts: Parts) -> Iterator[str]:
    """What tensors in no group are taken for, where nothing tells parameters from buffers."""
    frozen = [name for name, atom in atoms.items() if atom.kind is Kind.FROZEN and name not in parts.frozen]
    if frozen:
        yield f"in no group of the optimizer, so frozen parameters or buffers:\n{listed(frozen)}"
    buffers = (atom for atom in atoms.values() if atom.kind is Kind.BUFFER and not atom.global_shape)
    scalars = [atom.name for atom in buffers if atom.states[WEIGHT].dtype.is_floating]
    if scalars:
        yield (
            "scalars in no group of the optimizer, taken for buffers (--set frozen=NAME for one that is a frozen "
            f"parameter):\n{listed(scalars)}"
        )


def number_of(leaf: Leaf) -> StateIndex:
    """A state that is no tensor, such as a `step` of older torch. Raises UnsupportedError for what is no number."""
    number = None if isinstance(leaf.value, TensorRef) else state_from_scalar(leaf.value)
    if number is None:
        raise UnsupportedError(
            f"expected tensors and numbers as states of the optimizer; {show_path(leaf.path)} is "
            f"{described(leaf.value)}. Save without it"
        )
    return number


def find_keys(paths: Iterable[Path], parts: Parts) -> StateDictKeys | None:
    """Keys to model and optimizers; None where an optimizer numbers its parameters in another order than its groups.

    `paths`: of all entries. `parts`: what they are.
    """
    opened = ((*path, 0) if path[-1] == "param_groups" else path for path in paths)  # one object, until torch 2.3
    roots = sorted({root for path in opened if (root := optimizer_root(path)) is not None}, key=len)
    owners = [_owner(group, parts, roots) for group in parts.groups]
    optimizers = []
    for root in roots:
        keys = _optimizer_keys(root, [at for at, owner in enumerate(owners) if owner == root], parts)
        if keys is None:
            return None
        optimizers.append(keys)
    params = {
        name: key
        for name, leaf in parts.model.items()
        if (key := ".".join(map(str, leaf.path[len(parts.root) :]))) != name
    }
    return StateDictKeys(model=parts.root, params=params, optimizers=tuple(optimizers))


def _owner(group: ParamGroup, parts: Parts, roots: Sequence[Path]) -> Path:
    """Keys to the optimizer of a group: those above its states; the first, where it has none."""
    leaf = next((leaf for name in group.params for leaf in parts.states.get(name, {}).values()), None)
    above = [root for root in roots if leaf is not None and leaf.path[: len(root)] == root]
    return above[-1] if above else roots[0]


def _optimizer_keys(root: Path, groups: Sequence[int], parts: Parts) -> OptimizerKeys | None:
    """Keys of one optimizer, which has `groups`; None where its numbers are not those of their order."""
    names = [name for at in groups for name in parts.groups[at].params]
    keys: dict[str, str] = {}
    is_flat = False
    for name in names:
        for state, leaf in parts.states.get(name, {}).items():
            is_flat = len(leaf.path) == len(root) + 1
            path = leaf.path[len(root) :]  # of one key, the parts are joined
            keys[name] = str(path[0])[len(_STATE) + 1 : -len(state) - 1] if is_flat else str(path[1])
    others = {name: key for name, key in keys.items() if key != name}
    if not any(key.isdecimal() for key in others.values()):
        return OptimizerKeys(root=root, is_flat=is_flat, groups=tuple(groups), params=others)
    numbers = {name: number for number, name in enumerate(names)}
    if any(key != str(numbers[name]) for name, key in keys.items()):
        return None
    return OptimizerKeys(root=root, groups=tuple(groups), params=numbers)
