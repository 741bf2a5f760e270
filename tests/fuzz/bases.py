"""What is damaged: every kept fixture, stores of every kind that are written from some of them, and chains."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import ucp
from tests.fuzz.chains import RECIPES, Recipe

FIXTURES = Path(__file__).parents[2] / "fixtures"

Words = tuple[str, ...]
"""Options of `ucp convert`, as they are typed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A checkpoint that is whole."""

    name: str
    """Of the fixture, and of what was written from it."""
    fixture: Path
    """Folder that a framework wrote; never written to."""
    made: tuple[tuple[str, object], ...] = ()
    """Arguments of `ucp.convert` that write it from the fixture; none: it is the fixture."""
    targets: tuple[Words, ...] = ()
    """What it is converted to beside atoms; one of them at a time."""
    recipe: Recipe | None = None
    """Writes it, in place of a framework."""
    seed: int = 0
    """Of the recipe."""
    inner: str = ""
    """The folder in it that is opened, if not itself: a version among others, a window beside its dense checkpoint."""

    @property
    def is_virtual(self) -> bool:
        """Whether it refers to the fixture's files, by their time of change too."""
        return dict(self.made).get("virtual", False) is True

    @property
    def is_store(self) -> bool:
        """Whether it is an atom store."""
        return self.recipe is not None or (bool(self.made) and dict(self.made).get("to", "ucp") == "ucp")

    @property
    def format(self) -> str:
        """Name of the folder of fixtures: checkpoints of one format can be mixed up."""
        if self.recipe is not None:
            return self.recipe.__name__
        return f"{self.fixture.parents[1].name} {self.fixture.name == 'universal'} {self.made}"

    def make(self, folder: Path, pristine: Path) -> Path:
        """Put a copy of it below `folder`; its path. `pristine`: where `keep` put it."""
        if self.is_virtual:
            shutil.copytree(self.fixture, folder / "source")
            ucp.convert(folder / "source", folder / "store", virtual=True, workers=1, fsync=False)
            return folder / "store"
        return Path(shutil.copytree(pristine, folder / "checkpoint"))

    def keep(self, folder: Path) -> Path:
        """The undamaged one, to copy and to compare with: the fixture, or what is written to `folder` once."""
        kept = folder / self.name
        if self.recipe is not None:
            if not kept.exists():
                self.recipe(kept, self.seed)
            return kept
        if not self.made or self.is_virtual:
            return self.fixture
        if not kept.exists():
            folder.mkdir(parents=True, exist_ok=True)
            ucp.convert(self.fixture, kept, workers=1, fsync=False, **dict(self.made))  # type: ignore[arg-type]
        return kept


DEEPSPEED: tuple[Words, ...] = (
    ("--to", "deepspeed", "--topology", "dp=3,zero=2"),
    ("--to", "deepspeed", "--topology", "dp=2,zero=3"),
    ("--to", "deepspeed-universal"),
)
MEGATRON: tuple[Words, ...] = (
    ("--to", "megatron", "--topology", "tp=1,dp=2", "--set", "transformer_impl=local"),
    ("--to", "megatron", "--topology", "tp=2", "--layout", "torch", "--set", "transformer_impl=local"),
    ("--to", "deepspeed-universal"),
)
TORCH: tuple[Words, ...] = (
    ("--to", "dcp", "--topology", "dp=3"),
    ("--to", "torch"),
)
HUGGINGFACE: tuple[Words, ...] = (
    ("--to", "dcp", "--topology", "dp=2"),
    ("--to", "huggingface"),
    ("--to", "deepspeed-universal", "--optimizer", "zero"),
)
CHAIN: tuple[Words, ...] = (
    ("--to", "torch"),
    ("--to", "torch", "--at", "1"),
    ("--to", "dcp", "--topology", "dp=2"),
    ("--to", "deepspeed-universal", "--step", "newest"),
)
WRITTEN: tuple[tuple[str, dict[str, object]], ...] = (
    ("deepspeed/z2-dp4-bf16", {"layout": "packed"}),
    ("deepspeed/z2-dp2-client-state", {"layout": "packed"}),
    ("megatron/gpt-tp2-pp2-dp2-full", {"layout": "packed"}),
    ("deepspeed/z3-dp4-subgroups", {"layout": "per-parameter"}),
    ("deepspeed/z1-dp2-fp16", {"compress": True}),
    ("megatron/mixtral-ep2-dp2-torch", {"compress": True}),
    ("deepspeed/z2-dp4-bf16", {"virtual": True}),
    ("deepspeed/z1-ep2", {"virtual": True}),
    ("megatron/llama-tp2-pp2-dp2-full", {"virtual": True}),
    ("deepspeed/z2-dp4-bf16", {"to": "deepspeed", "topology": "dp=3,zero=1"}),
    ("deepspeed/z2-dp4-bf16", {"to": "deepspeed", "topology": "dp=3,zero=3"}),
    ("deepspeed/z1-pp4-tied", {"to": "deepspeed", "topology": "pp=4,dp=2,zero=1"}),
    ("deepspeed/z2-dp4-bf16", {"to": "deepspeed-universal"}),
    ("deepspeed/z1-tp2-dp2", {"to": "deepspeed-universal"}),
    ("megatron/llama-tp2-dp2-dp", {"to": "megatron", "topology": "tp=2,pp=2,dp=2", "layout": "torch_dist"}),
    ("megatron/mixtral-ep2-dp2-torch", {"to": "megatron", "topology": "ep=2,dp=2", "layout": "torch"}),
    ("torch/fsdp2-dp2-tp2", {"to": "dcp", "topology": "dp=2,tp=2"}),
    ("torch/fsdp2-dp4", {"to": "torch"}),
    ("huggingface/llama", {"to": "huggingface"}),
)
"""Fixture, and how it is written."""


def _label(arguments: dict[str, object]) -> str:
    words = (value if isinstance(value, str) else key for key, value in arguments.items())
    return "-".join(str(word).replace("=", "").replace(",", "-") for word in words)


def _case(path: Path) -> str:
    """Name of a fixture; one has a universal folder beside what it was made of."""
    return f"{path.parent.name}.universal" if path.name == "universal" else path.parent.name


def _bases() -> tuple[Base, ...]:
    wholes = ("*/checkpoint", "*/checkpoint-*", "*/universal", "*/model")
    targets = {"deepspeed": DEEPSPEED, "huggingface": HUGGINGFACE, "megatron": MEGATRON, "torch": TORCH}
    paths = sorted(path for kind in targets for own in wholes for path in (FIXTURES / kind).glob(own))
    kept = {f"{path.parents[1].name}/{_case(path)}": path for path in paths}
    fixtures = [Base(name=_case(path), fixture=path, targets=targets[path.parents[1].name]) for path in kept.values()]
    written = [
        Base(
            name=f"{name.split('/')[1]}.{_label(arguments)}",
            fixture=kept[name],
            made=tuple(arguments.items()),
            targets=targets[name.split("/")[0]],
        )
        for name, arguments in WRITTEN
    ]
    windows = [
        Base(name=f"window-{path.parent.name}", fixture=path, targets=CHAIN, inner="moevement")
        for path in sorted((FIXTURES / "moevement").glob("*/checkpoint"))
    ]
    chains = [
        Base(name=f"{recipe.__name__}-{seed}", fixture=FIXTURES, recipe=recipe, seed=seed, inner=inner, targets=CHAIN)
        for recipe, inner in RECIPES
        for seed in (0, 1)
    ]
    return (*fixtures, *written, *windows, *chains)


BASES = _bases()
"""All of them, in an order that is the same everywhere."""
