"""Sort the entries of a state dict into model, optimizers and the rest, by their paths alone.

Scripts nest and name them as they like:

1. An optimizer is a dict with `param_groups` (`optimizer`).
2. The model is the dict of tensors that the optimizer trains (`model_dict`).
3. Everything else is an extra under its own path.

>>> entries = [StateEntry(("model", "_orig_mod.w"), (2,)), StateEntry(("lr",), None, 0.1)]
>>> saved = sort_entries(entries, "somewhere")
>>> saved.model["w"].shape, saved.others
((2,), {'lr': 0.1})
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import reduce
from operator import or_

from ucp.core.index import UnnamedStates
from ucp.errors import IdleOptionError, MalformedError, UnsupportedError, format_count, format_list
from ucp_formats.torch.state_dict.entries import GROUPS, StateDict, StateEntry, nest, show_path
from ucp_formats.torch.state_dict.model_dict import (
    OptimizedParams,
    Path,
    aside_text,
    has_ddp,
    model_naming,
    model_path,
    module_state_path,
    name_below,
)
from ucp_formats.torch.state_dict.numbered import Order
from ucp_formats.torch.state_dict.optimizer import OptimizerEntries, optimizer_root

_MOMENTS = ("exp_avg", "momentum_buffer")
"""States of the shape of their parameter; an optimizer has one of them or none."""
_SAVE_BOTH = "Save both with torch.distributed.checkpoint.state_dict.get_state_dict, which gives them the same names"


def sort_entries(
    entries: Iterable[StateEntry],
    where: str,
    *,
    in_order: bool = True,
    order: Order | None = None,
    unnamed: UnnamedStates | None = None,
) -> StateDict:
    """The entries, sorted. `where`: the checkpoint, for messages.

    `in_order`: whether entries of the model are in the order of its parameters. `order`: the user's names for the
    numbers of an optimizer. `unnamed`: states that are not among `entries`, because they could not be named. Raises
    MalformedError if entries contradict one another, UsageError for an order that does not fit, IdleOptionError for
    one that is not needed.
    """
    entries = [inner for entry in entries for inner in _open(entry)]
    roots = sorted({root for entry in entries if (root := optimizer_root(entry.path)) is not None}, key=len)
    optimizers = [OptimizerEntries(root) for root in roots]
    outside = [entry for entry in entries if not any(optimizer.take(entry) for optimizer in optimizers)]
    saved = _sort_model(outside, reduce(or_, (optimizer.trained for optimizer in optimizers), OptimizedParams()), where)
    saved.unnamed, saved.is_numbered = unnamed, unnamed is not None
    for optimizer in optimizers:
        optimizer.add_to(saved, where, in_order=in_order, order=order)
    if order is not None and not saved.is_numbered:
        raise IdleOptionError(f"no optimizer in {where} numbers its parameters: drop --param-order")
    _drop_absent(saved)
    _check(saved, where)
    _set_trained(saved)
    return saved


def _sort_model(entries: Iterable[StateEntry], trained: OptimizedParams, where: str) -> StateDict:
    """The model, what its modules save beside tensors, and the rest; `entries` are those outside of optimizers."""
    entries = list(entries)
    dicts: dict[Path, dict[str, tuple[int, ...]]] = {}
    for entry in entries:
        if entry.shape is not None and isinstance(entry.path[-1], str):
            dicts.setdefault(entry.path[:-1], {})[entry.path[-1]] = entry.shape
    root = model_path(dicts, trained, where)
    saved = StateDict(root=root)
    aside = [path for path, shapes in dicts.items() if root and path[: len(root)] != root and len(shapes) > 1]
    if aside:
        saved.notes.append(aside_text(show_path(path) or "." for path in aside))
    in_model = (name_below(entry.path, root) for entry in entries if entry.shape is not None)
    names = [name for name in in_model if name is not None]
    to_name = model_naming(names)
    if has_ddp(names):
        saved.notes.append("module. is removed from the beginning of all names: DistributedDataParallel added it")
    for entry in entries:
        if (path := module_state_path(entry.path, root)) is not None:
            nest(saved.modules, (to_name(str(path[0])), *path[1:]), entry.value)
        elif entry.shape is None or (name := name_below(entry.path, root)) is None:
            nest(saved.others, entry.path, entry.value)
        elif (first := saved.model.setdefault(name := to_name(name), entry)) is not entry:
            raise MalformedError(f"{where} holds {name} twice: {show_path(first.path)}, {show_path(entry.path)}")
    return saved


def _open(entry: StateEntry) -> Iterator[StateEntry]:
    """Entries inside one that torch saved as one object: the groups, until torch 2.3; an optimizer without tensors."""
    value, path = entry.value, entry.path
    if isinstance(value, list) and path and path[-1] == GROUPS:
        inner: Iterable[tuple[object, object]] = enumerate(value)
    elif isinstance(value, dict) and (GROUPS in path[-2:] or any(str(key).startswith(GROUPS) for key in value)):
        inner = value.items()
    else:
        yield entry
        return
    for key, item in inner:
        if item != {}:
            yield from _open(StateEntry((*path, key), None, item))


def _drop_absent(saved: StateDict) -> None:
    """Drop from the groups parameters that have no states and are not in the model.

    With `ignore_frozen_params`, `get_state_dict` saves frozen parameters in the groups alone (torch 2.13,
    `state_dict.py`, `_get_model_state_dict`).
    """
    listed_names = {name for group in saved.groups for name in group.params}
    absent = listed_names - saved.model.keys() - saved.states.keys()
    if absent and not listed_names.isdisjoint(saved.model):
        saved.groups = tuple(
            replace(group, params=tuple(name for name in group.params if name not in absent)) for group in saved.groups
        )
        saved.notes.append(
            f"{format_count(len(absent), 'parameter')} in groups of the optimizer, but without states and not in the "
            "model, left out (frozen parameters, if the run saved with ignore_frozen_params):\n"
            f"{format_list(sorted(absent))}"
        )


def _check(saved: StateDict, where: str) -> None:
    """Raise UnsupportedError for what the model lacks or several optimizers train, MalformedError for swapped names.

    Names of parameters were swapped if moments have the shapes of each other's parameters.
    """
    counts = Counter(name for group in saved.groups for name in group.params)
    unknown = sorted({*saved.states, *counts} - saved.model.keys())
    if unknown:
        remedy = (
            _SAVE_BOTH if saved.model else "There is no model here: join this folder and that of the weights by links"
        )
        raise UnsupportedError(
            f"{where}: the optimizer has {format_count(len(unknown), 'parameter')} that the model lacks:\n"
            f"{format_list(unknown)}\n{remedy}"
        )
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise UnsupportedError(
            f"{where}: expected each parameter in one optimizer; several optimizers train\n{format_list(twice)}\nThese "
            "belong to several models: save each model with its optimizer in a file of its own"
        )
    shapes: dict[str, tuple[tuple[int, ...] | None, tuple[int, ...] | None]] = {}
    for name, states in saved.states.items():
        moment = next((states[key] for key in _MOMENTS if key in states), None)
        if moment is not None and moment.shape != saved.model[name].shape:
            shapes[name] = saved.model[name].shape, moment.shape
    if shapes and Counter(shape for shape, _ in shapes.values()) == Counter(shape for _, shape in shapes.values()):
        lines = (f"{name}: {shape}, its moments {of_moments}" for name, (shape, of_moments) in shapes.items())
        raise MalformedError(
            f"{where}: expected moments in the shapes of their parameters; got shapes of other parameters, as if the "
            f"optimizer listed names in another order:\n{format_list(lines)}\n{_SAVE_BOTH}"
        )


def _set_trained(saved: StateDict) -> None:
    """Set what is trained, what is frozen, and which matrices are trained under a second name."""
    if not saved.groups:
        saved.trained = frozenset(saved.model)
        why = "saved without an optimizer" if saved.unnamed is None else "the optimizer's parameters are not known"
        saved.notes.append(f"{why}: every parameter counts as trained")
        trained_content = {entry.content: name for name, entry in reversed(saved.model.items()) if entry.is_identified}
    else:
        saved.trained = frozenset(name for group in saved.groups for name in group.params)
        matrices = ((name, saved.model[name]) for name in saved.trained)
        trained_content = {
            entry.content: name for name, entry in matrices if entry.is_known_matrix or entry.is_identified
        }
    for name, entry in saved.model.items():
        first = trained_content.get(entry.content)
        is_alias = first is not None and first != name and (name not in saved.trained or not saved.groups)
        if is_alias and (entry.is_known_matrix or entry.is_identified):
            saved.tied[name] = trained_content[entry.content]
    saved.trained -= saved.tied.keys()
    unstepped = sorted(saved.trained - saved.states.keys() - saved.lost.keys())
    if saved.states and unstepped:
        saved.frozen = frozenset(name for name in unstepped if 0 not in (saved.model[name].shape or ()))
        saved.notes.append(
            f"{format_count(len(unstepped), 'parameter')} in a group of the optimizer without states, which other "
            "parameters have: taken for frozen. If so, there is nothing to do. If they are trained and had no gradient "
            "yet, pass --set frozen=none. Otherwise their states are missing from the file:\n"
            f"{format_list(unstepped)}"
        )
