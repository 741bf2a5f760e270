"""What an index takes from the sorted state dict: kinds of tensors, numbers as states, and the keys that were saved.

`--to dcp --set style=source` writes under these keys again.

>>> step = StateEntry(("app", "opt", "state", "0", "step"), ())
>>> weight = StateEntry(("app", "model", "_orig_mod.w"), (2,))
>>> saved = StateDict(root=("app", "model"), model={"w": weight}, states={"w": {"step": step}})
>>> saved.groups = (ParamGroup(params=("w",), hyper={}),)
>>> keys = find_keys([("app", "opt", "param_groups", 0, "lr")], saved)
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
from ucp.errors import UnsupportedError, format_list
from ucp.io.pickle.fields import describe_value
from ucp_formats.torch.state_dict.entries import GROUPS, STATE, StateDict, StateEntry, show_path
from ucp_formats.torch.state_dict.model_dict import Path
from ucp_formats.torch.state_dict.optimizer import optimizer_root


def kind_of(name: str, saved: StateDict) -> Kind | None:
    """What a tensor of the model is to the optimizer; None if it is in no group.

    A parameter without states, if others have states, was not stepped: it is frozen. `AdamW(model.parameters())` lists
    frozen parameters too.
    """
    return Kind.FROZEN if name in saved.frozen else Kind.PARAMETER if name in saved.trained else None


def untrained_notes(atoms: Mapping[str, AtomIndex], saved: StateDict) -> Iterator[str]:
    """Notes on tensors in no group, if the checkpoint does not tell parameters from buffers."""
    frozen = [name for name, atom in atoms.items() if atom.kind is Kind.FROZEN and name not in saved.frozen]
    if frozen:
        yield f"in no group of the optimizer, so frozen parameters or buffers:\n{format_list(frozen)}"
    buffers = (atom for atom in atoms.values() if atom.kind is Kind.BUFFER and not atom.global_shape)
    scalars = [atom.name for atom in buffers if atom.states[WEIGHT].dtype.is_floating]
    if scalars:
        yield (
            "scalars in no group of the optimizer, taken for buffers (--set frozen=NAME for one that is a frozen "
            f"parameter):\n{format_list(scalars)}"
        )


def number_state_of(entry: StateEntry) -> StateIndex:
    """A state that is not a tensor, e.g. `step` of older torch. Raises UnsupportedError if it is not a number."""
    number = None if isinstance(entry.value, TensorRef) else state_from_scalar(entry.value)
    if number is None:
        raise UnsupportedError(
            f"expected tensors and numbers as states of the optimizer; {show_path(entry.path)} is "
            f"{describe_value(entry.value)}. Save the optimizer without it"
        )
    return number


def find_keys(paths: Iterable[Path], saved: StateDict) -> StateDictKeys | None:
    """Keys to model and optimizers; None if an optimizer numbers its parameters in another order than its groups.

    `paths`: of all entries.
    """
    opened = ((*path, 0) if path[-1] == GROUPS else path for path in paths)  # saved as one object until torch 2.3
    roots = sorted({root for path in opened if (root := optimizer_root(path)) is not None}, key=len)
    owners = [_optimizer_of(group, saved, roots) for group in saved.groups]
    optimizers = []
    for root in roots:
        keys = _optimizer_keys(root, [number for number, owner in enumerate(owners) if owner == root], saved)
        if keys is None:
            return None
        optimizers.append(keys)
    depth = len(saved.root)
    model_keys = {name: ".".join(map(str, entry.path[depth:])) for name, entry in saved.model.items()}
    params = {name: key for name, key in model_keys.items() if key != name}
    return StateDictKeys(model=saved.root, params=params, optimizers=tuple(optimizers))


def _optimizer_of(group: ParamGroup, saved: StateDict, roots: Sequence[Path]) -> Path:
    """Keys to the optimizer of a group: the one that contains its states; the first, if the group has no states."""
    entry = next((entry for name in group.params for entry in saved.states.get(name, {}).values()), None)
    above = [root for root in roots if entry is not None and entry.path[: len(root)] == root]
    return above[-1] if above else roots[0]


def _optimizer_keys(root: Path, groups: Sequence[int], saved: StateDict) -> OptimizerKeys | None:
    """Keys of the optimizer with these groups; None if its numbers are not in the order of the groups."""
    names = [name for group in groups for name in saved.groups[group].params]
    keys: dict[str, str] = {}
    is_flat = False
    for name in names:
        for state, entry in saved.states.get(name, {}).items():
            path = entry.path[len(root) :]
            is_flat = len(path) == 1  # `state.<name>.<state>`
            keys[name] = str(path[0])[len(STATE) + 1 : -len(state) - 1] if is_flat else str(path[1])
    other_keys = {name: key for name, key in keys.items() if key != name}
    if not any(key.isdecimal() for key in other_keys.values()):
        return OptimizerKeys(root=root, is_flat=is_flat, groups=tuple(groups), params=other_keys)
    numbers = {name: number for number, name in enumerate(names)}
    if any(key != str(numbers[name]) for name, key in keys.items()):
        return None
    return OptimizerKeys(root=root, groups=tuple(groups), params=numbers)
