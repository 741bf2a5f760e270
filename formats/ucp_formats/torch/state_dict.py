"""What the entries of a training script's state dict are: model, optimizer, and the rest.

A script may nest and name them as it likes, so that they are told by their paths alone:

1. An optimizer is where `param_groups` stands: as torch has it (`param_groups`, `state`), or with the parts of a path
   joined to one key (`state.<name>.exp_avg`), as `flatten_optimizer_state_dict` does.
2. The model is the dict of tensors that the optimizer trains (`model_dict`).
3. Everything else is an extra under its own path.

Sources: torch 2.13, `torch/distributed/checkpoint/state_dict.py`, `_nested_dict.py`.

>>> leaves = [Leaf(("model", "_orig_mod.w"), (2,)), Leaf(("lr",), None, 0.1)]
>>> parts = sorted_out(leaves, "somewhere")
>>> parts.model["w"].shape, parts.others
((2,), {'lr': 0.1})
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_

from ucp.core.index import STEP, LostStates, ParamGroup, UnnamedStates
from ucp.errors import IdleOptionError, MalformedError, UnsupportedError, counted, listed
from ucp_formats.torch.model_dict import (
    Path,
    Wanted,
    aside_text,
    fused_parts,
    has_ddp,
    longest_name,
    model_naming,
    model_path,
    module_state_path,
    name_below,
    name_in,
)
from ucp_formats.torch.numbered import Naming, Number, Order, UnnamedError, name_params, order_params

_GROUPS, _STATE = "param_groups", "state"
_PARAMS, _NAMES = "params", "param_names"
_MOMENTS = ("exp_avg", "momentum_buffer")
"""States of the shape of their parameter, where an optimizer has one."""
_FUSED_WHY = (
    "torchtitan saved the optimizer's states of these as one tensor, wqkv, whose rows go by head, and records nowhere "
    "how many heads there are: their states are left out. Start the optimizer anew, or save from a run with "
    "fuse_qkv = False"
)


@dataclass(frozen=True, slots=True)
class Leaf:
    """An entry of a state dict."""

    path: Path
    """Keys to it."""
    shape: tuple[int, ...] | None
    """Elements per dim; None for what is no tensor."""
    value: object = None
    """What it is: the object, or what stands for the tensor."""
    form: Hashable = None
    """Shape and cuts: those of a parameter are those of its states."""
    content: Hashable = None
    """Equal for tensors with the same elements, as far as that is known without reading them; None elsewhere."""
    is_place: bool = False
    """Whether that is the place where the elements lie: tensors are then one, and not equal by chance."""


@dataclass(slots=True, kw_only=True)
class Parts:
    """The entries, by what they are."""

    root: Path = ()
    """Keys to the model's dict."""
    model: dict[str, Leaf] = field(default_factory=dict)
    """Name of a parameter or buffer to its tensor, wrappers left out."""
    states: dict[str, dict[str, Leaf]] = field(default_factory=dict)
    """Name of a parameter to its optimizer states."""
    groups: tuple[ParamGroup, ...] = ()
    """The optimizer's groups."""
    trained: frozenset[str] = frozenset()
    """Parameters in a group; all, where there is no optimizer."""
    frozen: frozenset[str] = frozenset()
    """Those of them without states, which others have."""
    tied: dict[str, str] = field(default_factory=dict)
    """Second name of a parameter to its first: a matrix with the same elements, that no group has."""
    modules: dict[str, object] = field(default_factory=dict)
    """Name in the model to what a module keeps there beside its tensors, nested as it was saved."""
    others: dict[str, object] = field(default_factory=dict)
    """Everything else, nested as it was saved."""
    lost: dict[str, LostStates] = field(default_factory=dict)
    """Name of a parameter to why its states are not known."""
    notes: list[str] = field(default_factory=list)
    """What was inferred."""
    unnamed: UnnamedStates | None = None
    """States of the optimizer that could not be given to parameters."""
    is_numbered: bool = False
    """Whether the optimizer numbers its parameters."""


def unnamed_states(where: str, states: Iterable[str], error: UnnamedError) -> UnnamedStates:
    """States that could not be given to parameters. `where`: the checkpoint, `error`: why they could not."""
    keys = tuple(sorted(set(states)))
    return UnnamedStates(
        states=keys,
        reason=(
            f"{where}: the optimizer numbers its parameters, and {error}. Its states ({', '.join(keys) or 'none yet'}) "
            f"are not read; the weights are. {error.remedy}. Or take the weights alone (--include '*/weight')"
        ),
    )


def sorted_out(
    leaves: Iterable[Leaf],
    where: str,
    *,
    in_order: bool = True,
    order: Order | None = None,
    unnamed: UnnamedStates | None = None,
) -> Parts:
    """The entries of a state dict by what they are. `where`: for messages; `in_order`: the model's entries stand so.

    `order`: names for the numbers of an optimizer, as the user gives them; `unnamed`: states that are not among
    `leaves`, as they could not be named. Raises MalformedError where entries contradict one another, UsageError for
    an order that does not fit, IdleOptionError for one that is not needed.
    """
    leaves = [own for leaf in leaves for own in _opened(leaf)]
    roots = sorted({root for leaf in leaves if (root := optimizer_root(leaf.path)) is not None}, key=len)
    inside: list[_Optimizer] = [_Optimizer(root) for root in roots]
    outside = [leaf for leaf in leaves if not any(own.take(leaf) for own in inside)]
    dicts: dict[Path, dict[str, tuple[int, ...]]] = {}
    for leaf in outside:
        if leaf.shape is not None and isinstance(leaf.path[-1], str):
            dicts.setdefault(leaf.path[:-1], {})[leaf.path[-1]] = leaf.shape
    root = model_path(dicts, reduce(or_, (own.wanted for own in inside), Wanted()), where)
    parts = Parts(root=root, unnamed=unnamed, is_numbered=unnamed is not None)
    aside = [path for path, own in dicts.items() if root and path[: len(root)] != root and len(own) > 1]
    if aside:
        parts.notes.append(aside_text(show_path(path) or "." for path in aside))
    saved = [name for leaf in outside if leaf.shape is not None and (name := name_below(leaf.path, root)) is not None]
    naming = model_naming(saved)
    if has_ddp(saved):
        parts.notes.append("module., which DistributedDataParallel puts before names, is removed: all names have it")
    for leaf in outside:
        if (state := module_state_path(leaf.path, root)) is not None:
            _nest(parts.modules, replace(leaf, path=(naming(str(state[0])), *state[1:])))
        elif leaf.shape is None or (name := name_below(leaf.path, root)) is None:
            _nest(parts.others, leaf)
        elif parts.model.setdefault(name := naming(name), leaf) is not leaf:
            raise MalformedError(
                f"{where} holds {name} twice: {show_path(parts.model[name].path)}, {show_path(leaf.path)}"
            )
    for own in inside:
        own.give(parts, where, in_order=in_order, order=order)
    if order is not None and not parts.is_numbered:
        raise IdleOptionError(f"no optimizer in {where} numbers its parameters: drop --param-order")
    _leave_out_absent(parts)
    _check(parts, where)
    _set_trained(parts)
    unstepped = sorted(parts.trained - parts.states.keys() - parts.lost.keys())
    if parts.states and unstepped:
        parts.frozen = frozenset(name for name in unstepped if 0 not in (parts.model[name].shape or ()))
        parts.notes.append(
            f"{counted(len(unstepped), 'parameter')} in a group of the optimizer without states, which others have: "
            "taken for frozen. Nothing to do if they are. If they were trained and had no gradient yet: "
            f"--set frozen=none. If neither holds, their states are missing from the file:\n{listed(unstepped)}"
        )
    return parts


def _opened(leaf: Leaf) -> Iterator[Leaf]:
    """Entries of what torch kept as one object: until 2.3 groups, and an optimizer without tensors."""
    value, is_groups = leaf.value, bool(leaf.path) and leaf.path[-1] == _GROUPS
    if isinstance(value, list) and is_groups:
        below: Iterable[tuple[object, object]] = enumerate(value)
    elif isinstance(value, dict) and (_GROUPS in leaf.path[-2:] or any(str(key).startswith(_GROUPS) for key in value)):
        below = value.items()
    else:
        yield leaf
        return
    for key, own in below:
        if own != {}:
            yield from _opened(Leaf((*leaf.path, key), None, own))


def optimizer_root(path: Path) -> Path | None:
    """Keys to the optimizer that an entry is of, as far as the entry tells: of a group of parameters."""
    for at, item in enumerate(path):
        is_last = at + 1 == len(path)
        if (item == _GROUPS and not is_last) or (is_last and str(item).startswith(f"{_GROUPS}.")):
            return path[:at]
    return None


class _Optimizer:
    """Entries of one optimizer."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._states: list[tuple[Path, Leaf]] = []
        self._groups: dict[int, dict[str, object]] = {}
        self._flat: list[tuple[str, Leaf]] = []
        self._others: list[Leaf] = []

    def take(self, leaf: Leaf) -> bool:
        """Take an entry that lies below the optimizer's path; whether it does."""
        depth = len(self._root)
        if leaf.path[:depth] != self._root or len(leaf.path) == depth:
            return False
        match leaf.path[depth:]:
            case ("state", _, str(), *_):
                self._states.append((leaf.path[depth + 1 :], leaf))
            case ("state", _, _, *_):
                raise UnsupportedError(f"expected states of the optimizer under names; got {show_path(leaf.path)}")
            case ("param_groups", int() | str() as number, str(key)):
                group = self._groups.setdefault(int(number), {})
                group[key] = _setting(leaf)
            case (str(key),) if key.startswith((f"{_GROUPS}.", f"{_STATE}.")):
                self._flat.append((key, leaf))
            case _ if not self._root:
                return False
            case _:
                self._others.append(leaf)
        return True

    @property
    def wanted(self) -> Wanted:
        """What it trains, as far as that tells the model."""
        shapes = {str(path[0]): leaf.shape for path, leaf in self._states if leaf.shape}
        keys = (key.removeprefix(f"{_STATE}.") for key, _ in self._flat if key.startswith(f"{_STATE}."))
        return Wanted.of(self._groups.values(), shapes, keys)

    def give(self, parts: Parts, where: str, *, in_order: bool, order: Order | None) -> None:
        """Give states and groups to `parts`, by the names of its model."""
        for leaf in self._others:
            _nest(parts.others, leaf)
        self._give_flat(parts, where)
        if not self._groups:
            return
        params = {number: self._params(group, where) for number, group in sorted(self._groups.items())}
        # names as the groups have them: of numbers, those beside them (torch 2.6 and later, of named parameters)
        naming: dict[str | int, str] = {}
        for number, own in params.items():
            names = self._groups[number].get(_NAMES)
            said = names if isinstance(names, list) and len(names) == len(own) else own
            naming |= {key: name_in(parts.model.__contains__, str(name)) for key, name in zip(own, said, strict=True)}
        if any(isinstance(name, int) for name in naming) and not any(
            _NAMES in group for group in self._groups.values()
        ):
            parts.is_numbered = True
            try:
                found = self._infer_names(list(params.values()), parts.model, in_order=in_order, order=order)
            except UnnamedError as error:
                parts.unnamed = unnamed_states(where, (str(path[1]) for path, _ in self._states), error)
                return
            naming = found.names
            parts.notes.append(f"the optimizer numbers its parameters: they are named in {found.how}")
        by_text = {str(name): own for name, own in naming.items()}
        for path, leaf in self._states:
            name = by_text.get(str(path[0]))
            if name is None:
                raise MalformedError(f"{where}: {show_path(leaf.path)} is of a parameter that is in no group")
            if leaf.shape is not None or leaf.value is not None:
                parts.states.setdefault(name, {})[".".join(map(str, path[1:]))] = leaf
        parts.groups += tuple(
            ParamGroup(
                params=tuple(naming[name] for name in params[number]),
                hyper={key: value for key, value in self._groups[number].items() if key not in (_PARAMS, _NAMES)},
            )
            for number in params
        )

    def _infer_names(
        self, groups: Sequence[Sequence[Number]], model: Mapping[str, Leaf], *, in_order: bool, order: Order | None
    ) -> Naming:
        """Names for the numbers of its groups. Raises UnnamedError, UsageError for an `order` that does not fit."""
        by_dims = sorted(self._states, key=lambda item: len(item[1].shape or ()))  # those of the parameter's shape last
        states = {str(path[0]): leaf.form for path, leaf in by_dims if leaf.shape is not None and path[-1] != STEP}
        # each tensor under the first of its names: of two that are only equal one may be frozen
        leaves = reversed(list(model.items()))
        firsts = {leaf.content if leaf.is_place and _is_matrix(leaf) else name: name for name, leaf in leaves}
        chosen = set(firsts.values())
        forms = {name: leaf.form for name, leaf in model.items() if name in chosen}
        if order is not None:
            sized = {str(path[0]): leaf.shape for path, leaf in self._states if leaf.shape}
            sized |= {name: leaf.shape or () for name, leaf in model.items()}
            return order_params(groups, states, {name: leaf.form for name, leaf in model.items()}, order, shapes=sized)
        shapes = {name: model[name].shape or () for name in forms}
        return name_params(groups, states, forms, shapes=shapes, in_order=in_order)

    def _params(self, group: Mapping[str, object], where: str) -> Sequence[str | int]:
        params = group.get(_PARAMS)
        if not isinstance(params, list | tuple) or not all(isinstance(own, str | int) for own in params):
            raise MalformedError(
                f"{where}: expected the parameters of every group under {show_path((*self._root, _GROUPS))}: a list of "
                f"names or numbers; got {type(params).__name__}"
            )
        return params

    def _give_flat(self, parts: Parts, where: str) -> None:
        """States and groups whose keys are joined to one: names have dots too, so that the model's names tell them."""
        hyper: dict[str, dict[str, object]] = {}
        strays = []
        for key, leaf in self._flat:
            kind, _, rest = key.partition(".")
            text = name_in(lambda own: longest_name(own, parts.model), rest)
            name = longest_name(text, parts.model)
            names, last = fused_parts(text, parts.model)
            if name is not None:
                names, last = (name,), text[len(name) + 1 :]
            elif names:
                parts.lost.update(dict.fromkeys(names, LostStates(reason=_FUSED_WHY)))
            else:
                strays.append(key)
            for own in names:
                if kind != _STATE:
                    hyper.setdefault(own, {})[last] = _setting(leaf)
                elif own not in parts.lost and (leaf.shape is not None or leaf.value is not None):
                    parts.states.setdefault(own, {})[last] = leaf
        settings = [key for key in strays if not key.startswith(f"{_STATE}.")]
        if len(settings) < len(strays):
            raise MalformedError(
                f"{where}: the optimizer has {counted(len(strays), 'entry', 'entries')} of no parameter of the model:\n"
                f"{listed(strays)}"
            )
        if settings:
            parts.notes.append(
                "settings of parameters that the model lacks, and that have no states, left out (frozen, where "
                f"get_state_dict was told to ignore such):\n{listed(settings)}"
            )
        groups: dict[str, list[str]] = {}  # of equal settings, which is all that a flattened optimizer says of them
        for name in (name for name in parts.model if name in hyper):
            groups.setdefault(repr(sorted(hyper[name].items())), []).append(name)
        parts.groups += tuple(ParamGroup(params=tuple(own), hyper=dict(hyper[own[0]])) for own in groups.values())


def _setting(leaf: Leaf) -> object:
    if leaf.shape is not None:
        raise UnsupportedError(
            f"expected settings of the optimizer that are no tensors; {show_path(leaf.path)} is one of shape "
            f"{list(leaf.shape)}. Save it as a number (group['lr'] = group['lr'].item())"
        )
    return leaf.value


def _is_matrix(leaf: Leaf) -> bool:
    """Whether equal elements mean one tensor: vectors of ones or zeros are equal often."""
    return leaf.content is not None and leaf.shape is not None and len(leaf.shape) > 1


def _set_trained(parts: Parts) -> None:
    """Say what is trained, and which matrices are so under a second name."""
    if not parts.groups:
        parts.trained = frozenset(parts.model)
        why = "saved without an optimizer" if parts.unnamed is None else "the optimizer's parameters are not known"
        parts.notes.append(f"{why}: every parameter counts as trained")
        return
    parts.trained = frozenset(name for group in parts.groups for name in group.params)
    trained = {parts.model[name].content: name for name in parts.trained if _is_matrix(parts.model[name])}
    for name, leaf in parts.model.items():
        if name not in parts.trained and _is_matrix(leaf) and leaf.content in trained:
            parts.tied[name] = trained[leaf.content]


def _nest(others: dict[str, object], leaf: Leaf) -> None:
    """Put an entry where it stood. Numbers of lists become keys: a list of which items were saved apart."""
    place: dict[object, object] = others  # type: ignore[assignment]  # keys below the first may be numbers
    for item in leaf.path[:-1]:
        below = place.setdefault(item, {})
        if not isinstance(below, dict):
            return
        place = below
    place[leaf.path[-1]] = leaf.value


def _leave_out_absent(parts: Parts) -> None:
    """Leave parameters of groups out that have no states, and that the model lacks.

    torch saves so with `get_state_dict(ignore_frozen_params=True)`: frozen ones are in the groups alone (torch 2.13,
    `state_dict.py`, `_get_model_state_dict`).
    """
    known = {*parts.model, *parts.states}
    absent = {name for group in parts.groups for name in group.params if name not in known}
    if absent and any(name in parts.model for group in parts.groups for name in group.params):
        parts.groups = tuple(
            replace(group, params=tuple(name for name in group.params if name not in absent)) for group in parts.groups
        )
        parts.notes.append(
            f"{counted(len(absent), 'parameter')} in groups of the optimizer without states, and not in the model, "
            f"left out (frozen, where get_state_dict was told to ignore such):\n{listed(sorted(absent))}"
        )


def _check(parts: Parts, where: str) -> None:
    """Raise UnsupportedError for what the model lacks or several optimizers train, MalformedError for exchanged names.

    Names of parameters were exchanged where moments have the shapes of one another's.
    """
    unknown = sorted({*parts.states, *(own for group in parts.groups for own in group.params)} - parts.model.keys())
    if unknown:
        raise UnsupportedError(
            f"{where}: the optimizer has {counted(len(unknown), 'parameter')} that the model lacks:\n"
            f"{listed(unknown)}\nSave both with torch.distributed.checkpoint.state_dict.get_state_dict, which gives "
            "them the same names"
        )
    seen = Counter(name for group in parts.groups for name in group.params)
    twice = sorted(name for name, number in seen.items() if number > 1)
    if twice:
        raise UnsupportedError(
            f"{where}: expected one optimizer of each parameter; more than one trains\n{listed(twice)}\nThey are of "
            "several models: save each model with its optimizer in a file of its own"
        )
    own: dict[str, tuple[int, ...] | None] = {}
    moments: dict[str, tuple[int, ...] | None] = {}
    for name, states in parts.states.items():
        moment = next((states[key] for key in _MOMENTS if key in states), None)
        if moment is not None and moment.shape != parts.model[name].shape:
            own[name], moments[name] = parts.model[name].shape, moment.shape
    if own and Counter(own.values()) == Counter(moments.values()):
        lines = (f"{name}: {own[name]}, its moments {moments[name]}" for name in own)
        raise MalformedError(
            f"{where}: expected moments in the shapes of their parameters; got those of others, as if the optimizer "
            f"had their names in another order:\n{listed(lines)}\nSave both with "
            "torch.distributed.checkpoint.state_dict.get_state_dict, which gives them the same names"
        )


def show_path(path: Path) -> str:
    """Keys to an entry, for messages."""
    return "/".join(map(str, path))
