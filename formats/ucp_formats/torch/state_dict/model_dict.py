"""Which dict of tensors is the model: averages of weights, teachers and further models have the same names and shapes.

1. Candidates hold what the optimizer trains: its names or, if it numbers parameters, their shapes. Without an
   optimizer, candidates are the dict with the most tensors and dicts with nearly the same names.
2. Of several candidates, the model is the only one with a usual name (`model`, `state_dict`), or the only one that
   holds exactly what the optimizer trains.

>>> shapes = {"w": (2,), "b": (3,)}
>>> averaged = {"module.w": (2,), "module.b": (3,), "n_averaged": ()}
>>> model_path({("ema",): averaged, ("model",): shapes}, OptimizedParams(names=frozenset({"w", "b"})), "somewhere")
('model',)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ucp.contract.run_extras import is_module_state
from ucp.errors import UnsupportedError, format_count, format_list

Path = tuple[object, ...]
"""Keys of nested dicts (strings) and lists (numbers)."""

Shape = tuple[int, ...]

Dicts = Mapping[Path, Mapping[str, Shape]]
"""Path of a dict to the shapes of its tensors."""

FLAT = "_flat_param"
"""Last part of the name of a flat parameter of FSDP1, in a LOCAL_STATE_DICT."""

_CALLED = frozenset({"model", "model_state", "model_state_dict", "module", "net", "network", "state_dict"})
"""Usual names of the model's dict."""
_DDP = "module."
"""What DistributedDataParallel puts before every name."""
_FUSED = {"wqkv": ("wq", "wk", "wv")}
"""One parameter for torchtitan's optimizer (0.3, `fuse_qkv`), and the three that the model saves for it."""
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Modules that torch.compile, activation checkpointing and FSDP1 put around others; not part of a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizedParams:
    """What optimizers train, as far as their entries tell."""

    names: frozenset[str] = frozenset()
    """Names of parameters, without wrappers."""
    shapes: Sequence[Shape | None] = ()
    """Shapes of numbered parameters; None for one without states."""
    keys: frozenset[str] = frozenset()
    """Keys of a flattened optimizer, `<parameter>.<state or setting>`, without wrappers."""

    @classmethod
    def from_groups(
        cls, groups: Iterable[object], states: Mapping[str, Shape], keys: Iterable[str] = ()
    ) -> OptimizedParams:
        """From torch's groups, the shapes of states by name or number, and joined keys."""
        names: set[str] = set()
        shapes: list[Shape | None] = []
        for group in groups:
            settings = group if isinstance(group, dict) else {}
            params, param_names = settings.get("params"), settings.get("param_names")
            items = param_names if isinstance(param_names, list) else params if isinstance(params, list | tuple) else ()
            names |= {bare_name(name) for name in items if isinstance(name, str)}
            shapes += [states.get(str(number)) for number in items if isinstance(number, int)]
        return cls(names=frozenset(names), shapes=shapes, keys=frozenset(map(bare_name, keys)))

    def __or__(self, other: OptimizedParams) -> OptimizedParams:
        return OptimizedParams(
            names=self.names | other.names, shapes=[*self.shapes, *other.shapes], keys=self.keys | other.keys
        )

    def fits(self, tensors: Mapping[str, Shape]) -> bool:
        """Whether a dict of tensors (bare name to shape) holds all that is trained; False if nothing is."""
        numbered = Counter(shape for shape in self.shapes if shape is not None)
        return (
            self.count(tensors) > 0
            and self.names <= tensors.keys()
            and numbered <= Counter(tensors.values())
            and len(self.shapes) <= len(tensors)
            and all(longest_name(key, tensors) for key in self.keys)
        )

    def count(self, tensors: Mapping[str, Shape]) -> int:
        """How many of the tensors are trained, by name or by number."""
        by_key = {name for key in self.keys if (name := longest_name(key, tensors))}
        return len(self.names & tensors.keys() | by_key) + len(self.shapes)


def model_path(dicts: Dicts, trained: OptimizedParams, where: str) -> Path:
    """Path of the model's dict; `()` if there are no dicts. Raises UnsupportedError if several can be the model."""
    bare = {path: {bare_name(name): shape for name, shape in shapes.items()} for path, shapes in dicts.items()}
    paths = [path for path, shapes in bare.items() if trained.fits(shapes)] or _find_largest(bare, trained)
    if len(paths) < 2:
        return paths[0] if paths else ()
    called = [path for path in paths if is_called_model(path)]
    exact = [path for path in paths if trained.count(bare[path]) == len(bare[path])]
    if len(called) == 1 and all(bare[path].keys() <= bare[called[0]].keys() for path in exact):
        return called[0]
    if not called and len(exact) == 1:
        return exact[0]
    raise UnsupportedError(
        f"{where}: expected one dict of tensors that can be the model; got {len(paths)}, and nothing tells the model "
        "from an average of it or from another "
        f"model:\n{format_list('/'.join(map(str, path)) or '.' for path in paths)}\nSave the one that the optimizer "
        "trains under the name model, or the others into files of their own"
    )


def is_called_model(path: Path) -> bool:
    """Whether a dict has a usual name of the model, or is the whole file."""
    return not path or path[-1] in _CALLED


def fused_parts(text: str, names: Container[str]) -> tuple[tuple[str, ...], str]:
    """If `text` starts with a fused parameter: the model's parameters in it, and the rest of `text`; else empty."""
    for fused, parts in _FUSED.items():
        module, _, rest = text.partition(f".{fused}.")
        kind, _, last = rest.partition(".")
        params = tuple(f"{module}.{part}.{kind}" for part in parts)
        if all(name in names for name in params):
            return params, last
    return (), ""


def name_below(path: Path, root: Path) -> str | None:
    """Saved name of a tensor in the model at `root`; None for one that lies elsewhere."""
    below = path[len(root) :]
    if path[: len(root)] != root or not below or (not root and len(below) > 1):
        return None
    return ".".join(map(str, below))


def module_state_path(path: Path, root: Path) -> Path | None:
    """Path below the model of what a module saves beside its tensors, its name joined by dots; None for other entries.

    >>> module_state_path(("model", "module.fc._extra_state", "amax"), ("model",))
    ('module.fc._extra_state', 'amax')
    """
    below = path[len(root) :]
    at = next((number for number, key in enumerate(below) if is_module_state(key)), None)
    if at is None or path[: len(root)] != root:
        return None
    return ".".join(map(str, below[: at + 1])), *below[at + 1 :]


def aside_text(names: Iterable[str]) -> str:
    """The note on dicts of tensors beside the model."""
    paths = sorted(names)
    return f"{format_count(len(paths), 'more dict')} of tensors beside the model, kept as extras:\n{format_list(paths)}"


def _find_largest(bare: Dicts, trained: OptimizedParams) -> list[Path]:
    """The dict with most of what is trained, then with most tensors; and those with nearly the same names."""
    most = max(bare, key=lambda path: (trained.count(bare[path]), len(bare[path]), -len(path)), default=None)
    if most is None:
        return []
    names = bare[most].keys()
    alike = [path for path, shapes in bare.items() if shapes.keys() <= names or shapes.keys() >= names]
    return [path for path in alike if path == most or 2 * len(bare[path]) > len(names)]


def longest_name(text: str, names: Container[str]) -> str | None:
    """The longest of `names` that `text` begins with, followed by a dot."""
    prefix = text.rpartition(".")[0]
    while prefix and prefix not in names:
        prefix = prefix.rpartition(".")[0]
    return prefix or None


def bare_name(name: str) -> str:
    """The name without wrapping modules and without the `module.` of DDP: for comparing names.

    >>> bare_name("module.layers.0._checkpoint_wrapped_module.w")
    'layers.0.w'
    """
    return _unwrap(name).removeprefix(_DDP) or name


def _unwrap(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def model_naming(names: Iterable[str]) -> Callable[[str], str]:
    """Maps saved names to those of the model: `module.` is from DDP only if all `names` have it.

    >>> [model_naming(names)("module.w") for names in (["module.w", "module.b"], ["module.w", "b"])]
    ['w', 'module.w']
    """
    return bare_name if has_ddp(names) else _unwrap


def has_ddp(names: Iterable[str]) -> bool:
    """Whether all names of a model start with the `module.` of DDP."""
    starts = [_unwrap(name).startswith(_DDP) for name in names]
    return bool(starts) and all(starts)


def name_in(is_known: Callable[[str], object], name: str) -> str:
    """The model's name for `name` of an optimizer, which may have a `module.` that the model's names lack."""
    return _unwrap(name) if is_known(_unwrap(name)) else bare_name(name)
