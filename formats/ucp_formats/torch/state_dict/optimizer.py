"""Entries of one optimizer, and the names of the model's parameters for them.

torch has them as `state` and `param_groups`, by number or name; `flatten_optimizer_state_dict` joins the keys to one
(`state.<name>.exp_avg`). Sources: torch 2.13, `torch/distributed/checkpoint/state_dict.py`, `_nested_dict.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ucp.core.index import STEP, LostStates, ParamGroup
from ucp.errors import MalformedError, UnsupportedError, format_count, format_list
from ucp_formats.torch.state_dict.entries import GROUPS, STATE, StateDict, StateEntry, nest, show_path, unnamed_states
from ucp_formats.torch.state_dict.model_dict import OptimizedParams, Path, fused_parts, longest_name, name_in
from ucp_formats.torch.state_dict.numbered import Number, NumberedNames, Order, UnnamedError, name_params, order_params

_PARAMS, _NAMES = "params", "param_names"
_FUSED_WHY = (
    "torchtitan saved the optimizer states of these parameters as one tensor, wqkv, with rows grouped by head, and "
    "does not record the number of heads: the states are left out. Start with a new optimizer, or save from a run with "
    "fuse_qkv = False"
)


def optimizer_root(path: Path) -> Path | None:
    """Keys to the optimizer that a setting of a group belongs to; None for any other entry."""
    for number, key in enumerate(path):
        is_last = number + 1 == len(path)
        if (key == GROUPS and not is_last) or (is_last and str(key).startswith(f"{GROUPS}.")):
            return path[:number]
    return None


class OptimizerEntries:
    """Entries of the optimizer at `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._states: list[tuple[Path, StateEntry]] = []
        self._groups: dict[int, dict[str, object]] = {}
        self._flat: list[tuple[str, StateEntry]] = []
        self._others: list[StateEntry] = []

    def take(self, entry: StateEntry) -> bool:
        """Take an entry if it lies below the optimizer's path. Returns whether it does."""
        depth = len(self._root)
        if entry.path[:depth] != self._root or len(entry.path) == depth:
            return False
        match entry.path[depth:]:
            case ("state", _, str(), *_):
                self._states.append((entry.path[depth + 1 :], entry))
            case ("state", _, _, *_):
                raise UnsupportedError(f"expected states of the optimizer under names; got {show_path(entry.path)}")
            case ("param_groups", int() | str() as number, str(key)):
                self._groups.setdefault(int(number), {})[key] = _setting(entry)
            case (str(key),) if key.startswith((f"{GROUPS}.", f"{STATE}.")):
                self._flat.append((key, entry))
            case _ if not self._root:
                return False
            case _:
                self._others.append(entry)
        return True

    @property
    def trained(self) -> OptimizedParams:
        """What it trains, as far as that helps to find the model."""
        shapes = {str(path[0]): entry.shape for path, entry in self._states if entry.shape}
        keys = (key.removeprefix(f"{STATE}.") for key, _ in self._flat if key.startswith(f"{STATE}."))
        return OptimizedParams.from_groups(self._groups.values(), shapes, keys)

    def add_to(self, saved: StateDict, where: str, *, in_order: bool, order: Order | None) -> None:
        """Add states and groups to `saved`, by the names of its model."""
        for entry in self._others:
            nest(saved.others, entry.path, entry.value)
        self._add_flat(saved, where)
        if not self._groups:
            return
        params = {number: self._params(group, where) for number, group in sorted(self._groups.items())}
        try:
            naming = self._names(params, saved, in_order=in_order, order=order)
        except UnnamedError as error:
            saved.unnamed = unnamed_states(where, (str(path[1]) for path, _ in self._states), error)
            return
        names_by_key = {str(key): name for key, name in naming.items()}
        for path, entry in self._states:
            name = names_by_key.get(str(path[0]))
            if name is None:
                raise MalformedError(f"{where}: {show_path(entry.path)} belongs to a parameter that is in no group")
            if not entry.is_empty:
                saved.states.setdefault(name, {})[".".join(map(str, path[1:]))] = entry
        saved.groups += tuple(
            ParamGroup(
                params=tuple(naming[key] for key in keys),
                hyper={key: value for key, value in self._groups[number].items() if key not in (_PARAMS, _NAMES)},
            )
            for number, keys in params.items()
        )

    def _names(
        self, params: Mapping[int, Sequence[Number]], saved: StateDict, *, in_order: bool, order: Order | None
    ) -> dict[Number, str]:
        """The model's names for what the groups list. Raises UnnamedError. torch 2.6 can save names beside numbers."""
        naming: dict[Number, str] = {}
        for number, keys in params.items():
            names = self._groups[number].get(_NAMES)
            texts = names if isinstance(names, list) and len(names) == len(keys) else keys
            naming |= {key: name_in(saved.model.__contains__, str(text)) for key, text in zip(keys, texts, strict=True)}
        has_numbers = any(isinstance(key, int) for key in naming)
        if has_numbers and not any(_NAMES in group for group in self._groups.values()):
            saved.is_numbered = True
            inferred = self._infer_names(list(params.values()), saved.model, in_order=in_order, order=order)
            saved.notes.append(f"the optimizer numbers its parameters: they are named in {inferred.how}")
            return inferred.names
        return naming

    def _infer_names(
        self,
        groups: Sequence[Sequence[Number]],
        model: Mapping[str, StateEntry],
        *,
        in_order: bool,
        order: Order | None,
    ) -> NumberedNames:
        """Names for the numbers of its groups. Raises UnnamedError, UsageError for an `order` that does not fit."""
        by_dims = sorted(self._states, key=lambda item: len(item[1].shape or ()))  # the parameter's shape comes last
        states = {str(path[0]): entry.form for path, entry in by_dims if entry.shape is not None and path[-1] != STEP}
        if order is not None:
            forms = {name: entry.form for name, entry in model.items()}
            shapes = {str(path[0]): entry.shape for path, entry in self._states if entry.shape}
            shapes |= {name: entry.shape or () for name, entry in model.items()}
            return order_params(groups, states, forms, order, shapes=shapes)
        # one storage under several names counts once, under the first; of two equal tensors one may be frozen
        entries = reversed(list(model.items()))
        firsts = {
            entry.content if entry.is_storage and entry.is_known_matrix else name: name for name, entry in entries
        }
        chosen = set(firsts.values())
        forms = {name: entry.form for name, entry in model.items() if name in chosen}
        shapes = {name: model[name].shape or () for name in forms}
        return name_params(groups, states, forms, shapes=shapes, in_order=in_order)

    def _params(self, group: Mapping[str, object], where: str) -> Sequence[Number]:
        params = group.get(_PARAMS)
        if not isinstance(params, list | tuple) or not all(isinstance(key, str | int) for key in params):
            raise MalformedError(
                f"{where}: expected the parameters of every group under {show_path((*self._root, GROUPS))}: a list of "
                f"names or numbers; got {type(params).__name__}"
            )
        return params

    def _add_flat(self, saved: StateDict, where: str) -> None:
        """Add states and groups with joined keys. Names have dots too: where a name ends, the model's names tell."""
        hyper: dict[str, dict[str, object]] = {}
        strays = []
        for key, entry in self._flat:
            kind, _, rest = key.partition(".")
            text = name_in(lambda prefix: longest_name(prefix, saved.model), rest)
            name = longest_name(text, saved.model)
            names, last = fused_parts(text, saved.model)
            if name is not None:
                names, last = (name,), text[len(name) + 1 :]
            elif names:
                saved.lost.update(dict.fromkeys(names, LostStates(reason=_FUSED_WHY)))
            else:
                strays.append(key)
            for param in names:
                if kind != STATE:
                    hyper.setdefault(param, {})[last] = _setting(entry)
                elif param not in saved.lost and not entry.is_empty:
                    saved.states.setdefault(param, {})[last] = entry
        settings = [key for key in strays if not key.startswith(f"{STATE}.")]
        if len(settings) < len(strays):
            raise MalformedError(
                f"{where}: the optimizer has {format_count(len(strays), 'entry', 'entries')} of no parameter of the "
                f"model:\n{format_list(strays)}"
            )
        if settings:
            saved.notes.append(
                "settings of parameters that have no states and are not in the model, left out (frozen parameters, if "
                f"the run saved with ignore_frozen_params):\n{format_list(settings)}"
            )
        groups: dict[str, list[str]] = {}  # by equal settings: a flattened optimizer records no groups
        for name in (name for name in saved.model if name in hyper):
            groups.setdefault(repr(sorted(hyper[name].items())), []).append(name)
        saved.groups += tuple(ParamGroup(params=tuple(names), hyper=hyper[names[0]]) for names in groups.values())


def _setting(entry: StateEntry) -> object:
    if entry.shape is not None:
        raise UnsupportedError(
            f"expected optimizer settings that are not tensors; {show_path(entry.path)} is one of shape "
            f"{list(entry.shape)}. Save it as a number (group['lr'] = group['lr'].item())"
        )
    return entry.value
