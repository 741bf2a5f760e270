"""Which dict of tensors is the model: averages of weights, teachers and further models have the same names and shapes.

1. Those that hold what the optimizer trains: its names or, where it numbers them, its shapes. Without an optimizer the
   dict with the most tensors, and those with the same names.
2. Of several the only one that is called as models are (`model`, `state_dict`), or is just what the optimizer trains.

>>> shapes = {"w": (2,), "b": (3,)}
>>> averaged = {"module.w": (2,), "module.b": (3,), "n_averaged": ()}
>>> model_path({("ema",): averaged, ("model",): shapes}, Wanted(names=frozenset({"w", "b"})), "somewhere")
('model',)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ucp.contract.run_extras import is_module_state
from ucp.errors import UnsupportedError, counted, listed

Path = tuple[object, ...]
"""Keys of nested dicts (texts) and lists (numbers)."""

Shape = tuple[int, ...]

Dicts = Mapping[Path, Mapping[str, Shape]]
"""Path of a dict to the shapes of its tensors."""

FLAT = "_flat_param"
"""Last part of the name of a flat parameter of FSDP1, in a LOCAL_STATE_DICT."""

_CALLED = frozenset({"model", "model_state", "model_state_dict", "module", "net", "network", "state_dict"})
"""What scripts call the dict of the model."""
_DDP = "module."
"""What DistributedDataParallel puts before every name."""
_FUSED = {"wqkv": ("wq", "wk", "wv")}
"""What torchtitan (0.3, `fuse_qkv`) trains as one parameter and saves apart, as the model's but not the optimizer's."""
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Modules that torch.compile, activation checkpointing and FSDP1 put around others; no parts of a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What optimizers train."""

    names: frozenset[str] = frozenset()
    """Names of parameters, wrappers left out"""
    shapes: Sequence[Shape | None] = ()
    """Shapes of those that are numbered; None where one has no states"""
    keys: frozenset[str] = frozenset()
    """Names of parameters with those of states or settings behind a dot, wrappers left out"""

    @classmethod
    def of(cls, groups: Iterable[object], states: Mapping[str, Shape], keys: Iterable[str] = ()) -> Wanted:
        """From groups as torch has them, the shapes of states by name or number, and joined keys."""
        names: set[str] = set()
        shapes: list[Shape | None] = []
        for group in groups:
            own = group if isinstance(group, dict) else {}
            params, said = own.get("params"), own.get("param_names")
            listed_names = said if isinstance(said, list) else params if isinstance(params, list | tuple) else ()
            names |= {bare_name(name) for name in listed_names if isinstance(name, str)}
            shapes += [states.get(str(number)) for number in listed_names if isinstance(number, int)]
        return cls(names=frozenset(names), shapes=shapes, keys=frozenset(map(bare_name, keys)))

    def __or__(self, other: Wanted) -> Wanted:
        return Wanted(names=self.names | other.names, shapes=[*self.shapes, *other.shapes], keys=self.keys | other.keys)

    def fits(self, tensors: Mapping[str, Shape]) -> bool:
        """Whether a dict of tensors (bare name to shape) holds all of it; False where there is nothing."""
        numbered = Counter(own for own in self.shapes if own is not None)
        return (
            self.count(tensors) > 0
            and self.names <= tensors.keys()
            and numbered <= Counter(tensors.values())
            and len(self.shapes) <= len(tensors)
            and all(longest_name(key, tensors) for key in self.keys)
        )

    def count(self, tensors: Mapping[str, Shape]) -> int:
        """How many of the tensors it names, or numbers."""
        by_key = {name for key in self.keys if (name := longest_name(key, tensors))}
        return len(self.names & tensors.keys() | by_key) + len(self.shapes)


def model_path(dicts: Dicts, wanted: Wanted, where: str) -> Path:
    """Path of the model's dict; `()` where there are none. Raises UnsupportedError where nothing tells which it is."""
    bare = {path: {bare_name(name): shape for name, shape in own.items()} for path, own in dicts.items()}
    found = [path for path, own in bare.items() if wanted.fits(own)] or _largest(bare, wanted)
    if len(found) < 2:
        return found[0] if found else ()
    called = [path for path in found if is_called_model(path)]
    exact = [path for path in found if wanted.count(bare[path]) == len(bare[path])]
    if len(called) == 1 and all(bare[path].keys() <= bare[called[0]].keys() for path in exact):
        return called[0]
    if not called and len(exact) == 1:
        return exact[0]
    raise UnsupportedError(
        f"{where}: expected one dict of tensors that can be the model; got {len(found)}, and nothing tells the model "
        f"from an average of it or from another model:\n{listed('/'.join(map(str, path)) or '.' for path in found)}\n"
        "Save the one that the optimizer trains under the name model, or the others into files of their own"
    )


def is_called_model(path: Path) -> bool:
    """Whether a dict has a name that scripts give to the model, or is the file itself."""
    return not path or path[-1] in _CALLED


def fused_parts(text: str, names: Container[str]) -> tuple[tuple[str, ...], str]:
    """The parameters that the model has for a fused one at the start of `text`, and what follows it; none: no such."""
    for fused, parts in _FUSED.items():
        module, _, rest = text.partition(f".{fused}.")
        kind, _, last = rest.partition(".")
        apart = tuple(f"{module}.{part}.{kind}" for part in parts)
        if all(name in names for name in apart):
            return apart, last
    return (), ""


def name_below(path: Path, root: Path) -> str | None:
    """Name of a tensor in the model at `root`, as it was saved; None for one that lies elsewhere."""
    below = path[len(root) :]
    if path[: len(root)] != root or not below or (not root and len(below) > 1):
        return None
    return ".".join(map(str, below))


def module_state_path(path: Path, root: Path) -> Path | None:
    """Path, from its saved name in the model on, of what a module keeps beside its tensors; None for other entries.

    >>> module_state_path(("model", "module.fc._extra_state", "amax"), ("model",))
    ('module.fc._extra_state', 'amax')
    """
    below = path[len(root) :]
    at = next((number for number, key in enumerate(below) if is_module_state(key)), None)
    if at is None or path[: len(root)] != root:
        return None
    return ".".join(map(str, below[: at + 1])), *below[at + 1 :]


def aside_text(names: Iterable[str]) -> str:
    """What to tell of dicts of tensors beside the model."""
    known = sorted(names)
    return f"{counted(len(known), 'more dict')} of tensors beside the model, kept as extras:\n{listed(known)}"


def _largest(bare: Dicts, wanted: Wanted) -> list[Path]:
    """The dict with the most of what is wanted and, of equal ones, the most tensors; then those with its names."""
    most = max(bare, key=lambda path: (wanted.count(bare[path]), len(bare[path]), -len(path)), default=None)
    if most is None:
        return []
    names = bare[most].keys()
    alike = [path for path, own in bare.items() if own.keys() <= names or own.keys() >= names]
    return [path for path in alike if path == most or 2 * len(bare[path]) > len(names)]


def longest_name(text: str, names: Container[str]) -> str | None:
    """The longest of `names` that `text` goes on from with a dot."""
    at = text.rfind(".")
    while at > 0:
        if text[:at] in names:
            return text[:at]
        at = text.rfind(".", 0, at)
    return None


def bare_name(name: str) -> str:
    """The name without the modules that only wrap others, and without the `module.` of DDP: for comparing names.

    >>> bare_name("module.layers.0._checkpoint_wrapped_module.w")
    'layers.0.w'
    """
    return _unwrapped(name).removeprefix(_DDP) or name


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def model_naming(names: Iterable[str]) -> Callable[[str], str]:
    """What gives the model's own name for one that was saved: `module.` is DDP's only where all `names` have it.

    >>> [model_naming(own)("module.w") for own in (["module.w", "module.b"], ["module.w", "b"])]
    ['w', 'module.w']
    """
    return bare_name if has_ddp(names) else _unwrapped


def has_ddp(names: Iterable[str]) -> bool:
    """Whether all names of a model start with the `module.` of DDP."""
    starts = [_unwrapped(name).startswith(_DDP) for name in names]
    return bool(starts) and all(starts)


def name_in(is_known: Callable[[str], object], name: str) -> str:
    """The model's name for one that an optimizer gives, which may have a `module.` that the model's lacks."""
    return _unwrapped(name) if is_known(_unwrapped(name)) else bare_name(name)
