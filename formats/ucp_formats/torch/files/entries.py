"""Turns what `torch.save` stored into entries: one per tensor of the model and of optimizers; the rest are extras.

The values of all ranks are walked side by side. Only the model, the optimizers, and dicts and lists that contain them
are opened; any other value is kept whole, as an extra.

1. An optimizer is a dict with `param_groups`.
2. The model is the dict of tensors that the optimizers train (`model_dict`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_

from ucp.contract.ranks import Checksums, make_rank_extras
from ucp.contract.run_extras import MODULE_STATE, is_module_state
from ucp.core.index import Extra
from ucp.core.tensor import TensorRef
from ucp.errors import MalformedError, UnsupportedError, format_list
from ucp.io.pickle.fields import describe_value
from ucp.io.pickle.values import Stub, walk_paths
from ucp_formats.torch.files.global_tensor import (
    GlobalTensor,
    global_shape,
    is_tensor,
    join_ranks,
    tensor_entry,
    unread_class,
)
from ucp_formats.torch.files.sharded import parse_shard
from ucp_formats.torch.state_dict.entries import GROUPS, StateEntry, show_path
from ucp_formats.torch.state_dict.model_dict import (
    FLAT,
    OptimizedParams,
    Path,
    is_called_model,
    model_naming,
    model_path,
)

RankValues = Mapping[int, object]
"""Rank to the value that it saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedEntries:
    """What the files of all ranks hold."""

    model: tuple[StateEntry, ...]
    """Entries of the model. If it has flat parameters (FSDP1), the value of each plain tensor is a `RankValues`."""
    optimizer: tuple[StateEntry, ...]
    """Entries of optimizers; the value of a tensor that ranks saved flat (FSDP1) is a `RankValues`."""
    extras: tuple[Extra, ...]
    """Everything else."""
    aside: tuple[str, ...]
    """Extras that are dicts of tensors, for example further models."""
    is_order_assumed: bool = False
    """Whether flat parameters were split in the order of the user's shapes, as they record no names."""


def collect_entries(items: Mapping[Path, RankValues], checksums: Checksums, where: str) -> SavedEntries:
    """Entries of several files.

    `items`: path of a file's value in the state dict of the whole checkpoint, to that value by rank. `where`: the
    checkpoint, for messages.

    Raises MalformedError if ranks contradict each other, UnsupportedError if several dicts can be the model, or if the
    model was pickled as an object.
    """
    firsts = {path: next(iter(values.values())) for path, values in items.items()}
    optimizers = {path: value for path, value in _dicts(firsts) if _is_optimizer(value)}
    model = _find_model(firsts, optimizers.values(), where)
    collector = _Collector(model, [*optimizers], checksums)
    for path, values in items.items():
        collector.collect(path, values)
    saved = collector.finish()
    if not (saved.model and is_called_model(model)):
        modules = (item for path, value in firsts.items() for item in pickled_objects(value, path, _OF_MODULES))
        _refuse_modules((item for item in modules if not saved.model or is_called_model(item[0])), where)
    return saved


_OF_MODULES = ("_parameters", "_modules")
"""Attributes of a `torch.nn.Module`."""


def _refuse_modules(modules: Iterable[tuple[Path, Stub]], where: str) -> None:
    """Raise UnsupportedError if a whole module was saved in place of its state dict."""
    names = [f"{show_path(path)} is {stub.made_by}" if path else str(stub.made_by) for path, stub in modules]
    if names:
        raise UnsupportedError(
            f"expected a state dict in {where}; got a pickled nn.Module: {', '.join(names[:3])}. Load it where its "
            "class can be imported (torch.load with weights_only=False), and save its state_dict()"
        )


def pickled_objects(value: object, path: Path, attributes: Iterable[str]) -> Iterator[tuple[Path, Stub]]:
    """Pickled objects inside `value` that have all of `attributes`, each with its path. `path`: that of `value`."""
    for place, item in walk_paths(value, path, enter=_is_no_optimizer):
        if isinstance(item, Stub) and all(item.attribute(name) is not None for name in attributes):
            yield place, item


def _is_optimizer(value: dict[object, object]) -> bool:
    return isinstance(value.get(GROUPS), list)


def _is_no_optimizer(value: object) -> bool:
    return not (isinstance(value, dict) and _is_optimizer(value))


def _items(value: object) -> Iterator[tuple[object, object]]:
    return iter(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())


def _dicts(firsts: Mapping[Path, object]) -> Iterator[tuple[Path, dict[object, object]]]:
    """All dicts with their paths, outermost first, except those inside optimizers."""
    for path, value in firsts.items():
        for place, item in walk_paths(value, path, enter=_is_no_optimizer):
            if isinstance(item, dict):
                yield place, item


def _find_model(firsts: Mapping[Path, object], optimizers: Iterable[dict[object, object]], where: str) -> Path:
    dicts: dict[Path, dict[str, tuple[int, ...]]] = {}
    for path, value in _dicts(firsts):
        tensors = {key: global_shape(item) for key, item in value.items() if isinstance(key, str) and is_tensor(item)}
        if tensors and not _is_optimizer(value):
            dicts[path] = tensors
    trained = reduce(or_, map(_trained_by, optimizers), OptimizedParams())
    return model_path(dicts, trained, where) if dicts else ("model",)


def _trained_by(optimizer: dict[object, object]) -> OptimizedParams:
    """What an optimizer trains. The shape of a parameter is that of its last state that has dims."""
    groups = optimizer[GROUPS]
    shapes = {
        str(number): global_shape(value)
        for number, states in _items(optimizer.get("state"))
        for _, value in _items(states)
        if is_tensor(value) and global_shape(value)
    }
    return OptimizedParams.from_groups(groups if isinstance(groups, list) else (), shapes)


class _Collector:
    """Collects the entries of the model and of optimizers, and the extras."""

    def __init__(self, model: Path, optimizers: list[Path], checksums: Checksums) -> None:
        self._model_path = model
        self._optimizer_paths = optimizers
        self._checksums = checksums
        self._has_flat = False
        self._to_name: Callable[[str], str] = str
        self._model: list[StateEntry] = []
        self._states: list[tuple[Path, RankValues]] = []
        self._values: list[StateEntry] = []
        self._extras: list[Extra] = []
        self._aside: list[str] = []
        self._unread: list[str] = []

    def collect(self, path: Path, values: RankValues) -> None:
        """Add the values at `path`: opened if entries of the model or of an optimizer lie below, else whole."""
        is_tensors = all(map(is_tensor, values.values()))
        in_model = path[:-1] == self._model_path
        if in_model and path and is_module_state(path[-1]):
            name = f"{MODULE_STATE}{self._to_name(str(path[-1]))}"
            self._extras += make_rank_extras(name, values, self._checksums)
        elif any(path[: len(root)] == root and path != root for root in self._optimizer_paths):
            self._collect_optimizer(path, values, is_tensors=is_tensors)
        elif is_tensors and in_model:
            is_range = self._has_flat and all(isinstance(value, TensorRef) for value in values.values())
            tensor = StateEntry(path, None, dict(values)) if is_range else self._join(path, values)
            self._model.append(tensor)
        elif any(root[: len(path)] == path for root in (self._model_path, *self._optimizer_paths)):
            self._open(path, values)
        else:
            kind = unread_class(next(iter(values.values()))) if in_model else None
            self._unread += [f"{path[-1]}: {kind}"] if kind else []
            self._collect_extra(path, values)

    def _open(self, path: Path, values: RankValues) -> None:
        if path == self._model_path:
            keys = [str(key) for key, value in _items(next(iter(values.values()))) if is_tensor(value)]
            self._has_flat = any(key.endswith(FLAT) for key in keys)
            self._to_name = model_naming(keys)
        items = {rank: dict(_items(value)) for rank, value in values.items()}
        if GROUPS in path:
            self._check_same_keys(path, items)
        for key in dict.fromkeys(key for of_rank in items.values() for key in of_rank):
            self.collect((*path, key), {rank: of_rank[key] for rank, of_rank in items.items() if key in of_rank})

    def _collect_optimizer(self, path: Path, values: RankValues, *, is_tensors: bool) -> None:
        first = next(iter(values.values()))
        if is_tensors:
            self._states.append((path, values))
        elif isinstance(first, dict) or (isinstance(first, list) and any(isinstance(item, dict) for item in first)):
            self._open(path, values)
        else:
            self._values.append(StateEntry(path, None, self._common_value(path, values)))

    def _join(self, path: Path, values: RankValues) -> StateEntry:
        return tensor_entry(path, join_ranks(values, show_path(path)))

    def _check_same_keys(self, path: Path, items: Mapping[int, Mapping[object, object]]) -> None:
        """Raise MalformedError for a group or a setting of the optimizer that some ranks have and others lack."""
        (first_rank, first), *others = items.items()
        for rank, of_rank in others:
            if odd := sorted(map(str, of_rank.keys() ^ first.keys())):
                raise MalformedError(
                    f"expected the same entries of {show_path(path)} on all ranks; only one of ranks {first_rank} and "
                    f"{rank} has {', '.join(odd)}. The files are from different runs or steps"
                )

    def _common_value(self, path: Path, values: RankValues) -> object:
        """The value that all ranks have. Raises MalformedError if they differ."""
        (rank, value), *_ = values.items()
        firsts = self._checksums.find_first_same(values.values())
        for other, first in zip(values, firsts, strict=True):
            if first:
                raise MalformedError(
                    f"expected one value of {show_path(path)} on all ranks; rank {rank} has {describe_value(value)}, "
                    f"rank {other} {describe_value(values[other])}. The files are from different runs or steps"
                )
        return value

    def _collect_extra(self, path: Path, values: RankValues) -> None:
        name = show_path(path)
        self._extras += make_rank_extras(name, values, self._checksums)
        first = next(iter(values.values()))
        if isinstance(first, dict) and sum(map(is_tensor, first.values())) > 1:
            self._aside.append(name)

    def finish(self) -> SavedEntries:
        """What was collected. Raises UnsupportedError for tensors of the model that are not plain.

        An FSDP1 optimizer that was saved by its own `state_dict` numbers its parameters, and has plain tensors although
        the model beside it is sharded: the ranks of such states are not joined here.
        """
        if self._unread:
            raise UnsupportedError(
                f"expected plain tensors in {show_path(self._model_path) or 'the model'}; got tensors of other "
                f"classes, which are not read:\n{format_list(self._unread)}\nSave them as plain tensors "
                "(tensor.dequantize(), tensor.to_dense(), tensor.resolve_conj(), tensor.as_subclass(torch.Tensor)), or "
                "leave them out"
            )
        is_sharded = any(isinstance(entry.value, GlobalTensor) and entry.value.is_shared for entry in self._model)
        has_shards = any(parse_shard(value, "") for _, values in self._states for value in values.values())
        is_flat = is_sharded and not has_shards
        states = [
            StateEntry(path, None, values)
            if is_flat and isinstance(path[-2], int) and any(getattr(ref, "shape", ()) for ref in values.values())
            else self._join(path, values)
            for path, values in self._states
        ]
        return SavedEntries(
            model=tuple(self._model),
            optimizer=(*states, *self._values),
            extras=tuple(self._extras),
            aside=tuple(self._aside),
        )
