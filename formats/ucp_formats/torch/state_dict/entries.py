"""Entries of a training script's state dict, before and after they are sorted into model, optimizers and the rest."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from ucp.core.index import LostStates, ParamGroup, UnnamedStates
from ucp_formats.torch.state_dict.model_dict import Path
from ucp_formats.torch.state_dict.numbered import UnnamedError

GROUPS, STATE = "param_groups", "state"
"""Keys of a torch optimizer's state dict."""


@dataclass(frozen=True, slots=True)
class StateEntry:
    """An entry of a state dict."""

    path: Path
    """Keys to it."""
    shape: tuple[int, ...] | None
    """Elements per dim; None if it is not a tensor."""
    value: object = None
    """The object, or a description of the stored tensor."""
    form: Hashable = None
    """Shape and shards: the same for a parameter and its states."""
    content: Hashable = None
    """Equal for tensors with the same elements, as far as that is known without reading them; else None."""
    is_storage: bool = False
    """Whether `content` is where the elements are stored: equal content is then one tensor, not a coincidence."""

    @property
    def is_known_matrix(self) -> bool:
        """Whether equal content means one tensor: only for matrices, as vectors of ones or zeros are often equal."""
        return self.content is not None and self.shape is not None and len(self.shape) > 1

    @property
    def is_identified(self) -> bool:
        """Whether equal content certainly means one tensor, because it is stored once."""
        return self.is_storage and self.content is not None and self.shape is not None and 0 not in self.shape

    @property
    def is_empty(self) -> bool:
        """Whether it is None and no tensor."""
        return self.shape is None and self.value is None


@dataclass(slots=True, kw_only=True)
class StateDict:
    """The entries, sorted into model, optimizer and the rest."""

    root: Path = ()
    """Keys to the model's dict."""
    model: dict[str, StateEntry] = field(default_factory=dict)
    """Name of a parameter or buffer, without wrappers, to its tensor."""
    states: dict[str, dict[str, StateEntry]] = field(default_factory=dict)
    """Name of a parameter to its optimizer states."""
    groups: tuple[ParamGroup, ...] = ()
    """The optimizer's groups."""
    trained: frozenset[str] = frozenset()
    """Parameters in a group; all parameters, if there is no optimizer."""
    frozen: frozenset[str] = frozenset()
    """Parameters in a group that have no states, if others have states."""
    tied: dict[str, str] = field(default_factory=dict)
    """Second name of a parameter to its first: a matrix with the same elements that is in no group."""
    modules: dict[str, object] = field(default_factory=dict)
    """Name in the model to what a module saves there beside its tensors, nested as it was saved."""
    others: dict[str, object] = field(default_factory=dict)
    """Everything else, nested as it was saved."""
    lost: dict[str, LostStates] = field(default_factory=dict)
    """Name of a parameter to why its states are not known."""
    notes: list[str] = field(default_factory=list)
    """What was inferred."""
    unnamed: UnnamedStates | None = None
    """States of the optimizer that could not be assigned to parameters."""
    is_numbered: bool = False
    """Whether the optimizer numbers its parameters."""


def unnamed_states(where: str, states: Iterable[str], error: UnnamedError) -> UnnamedStates:
    """States that `error` says could not be assigned to parameters; `where`: the checkpoint."""
    keys = tuple(sorted(set(states)))
    return UnnamedStates(
        states=keys,
        reason=(
            f"{where}: the optimizer numbers its parameters, and {error}. Its states ({', '.join(keys) or 'none yet'}) "
            f"are not read; the weights are. {error.remedy}. Or take the weights alone (--include '*/weight')"
        ),
    )


def nest(others: dict[str, object], path: Path, value: object) -> None:
    """Put a value at its path in nested dicts. A list whose items were saved one by one becomes a dict by position."""
    parent: dict[object, object] = others  # type: ignore[assignment]  # keys below the first may be numbers
    for key in path[:-1]:
        child = parent.setdefault(key, {})
        if not isinstance(child, dict):
            return
        parent = child
    parent[path[-1]] = value


def show_path(path: Path) -> str:
    """Keys to an entry, for messages."""
    return "/".join(map(str, path))
