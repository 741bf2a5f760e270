"""Keys of the state dict that a training script saved: what `--to dcp --set style=source` writes again.

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

from collections.abc import Iterable, Sequence

from ucp.core.index import ParamGroup
from ucp.core.names import OptimizerKeys, StateDictKeys
from ucp_formats.torch.model_dict import Path
from ucp_formats.torch.state_dict import Parts

__all__ = ["find_keys"]

_GROUPS, _STATE = "param_groups", "state"


def find_keys(paths: Iterable[Path], parts: Parts) -> StateDictKeys | None:
    """Keys to model and optimizers; None where an optimizer numbers its parameters in another order than its groups.

    `paths`: of all entries. `parts`: what they are.
    """
    roots = sorted({root for path in paths if (root := _root(path)) is not None}, key=len)
    owners = [_owner(group, parts, roots) for group in parts.groups]
    optimizers = []
    for root in roots:
        keys = _optimizer_keys(root, [at for at, owner in enumerate(owners) if owner == root], parts)
        if keys is None:
            return None
        optimizers.append(keys)
    params = {name: key for name, leaf in parts.model.items() if (key := _joined(leaf.path[len(parts.root) :])) != name}
    return StateDictKeys(model=parts.root, params=params, optimizers=tuple(optimizers))


def _joined(path: Path) -> str:
    return ".".join(map(str, path))


def _root(path: Path) -> Path | None:
    """Keys to the optimizer that an entry of a group is of; None for another entry."""
    for at, item in enumerate(path):
        if item == _GROUPS or (at + 1 == len(path) and str(item).startswith(f"{_GROUPS}.")):
            return path[:at]
    return None


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
            keys[name] = _key_of(leaf.path[len(root) :], state)
    others = {name: key for name, key in keys.items() if key != name}
    if not any(key.isdecimal() for key in others.values()):
        return OptimizerKeys(root=root, is_flat=is_flat, groups=tuple(groups), params=others)
    numbers = {name: number for number, name in enumerate(names)}
    if any(key != str(numbers[name]) for name, key in keys.items()):
        return None
    return OptimizerKeys(root=root, groups=tuple(groups), params=numbers)


def _key_of(path: Path, state: str) -> str:
    """What an optimizer calls the parameter of a state; `path`: below the optimizer."""
    return str(path[0])[len(_STATE) + 1 : -len(state) - 1] if len(path) == 1 else str(path[1])
