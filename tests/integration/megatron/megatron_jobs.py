"""Jobs of real megatron-core, many for one start of Python: sources are made, files of `ucp` are loaded and compared.

1. `make_sources` trains and saves the named cases (fixtures/make/megatron/megatron_cases.py), all with one release.
2. `load_all` loads any number of folders: one process for each release, in it one process group for each layout.
   What they do there is in `megatron_worker.py`.

Releases of megatron-core are fetched where they are not there yet (fixtures/make/megatron/megatron_versions.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parent
FIXTURES = _HERE.parents[2] / "fixtures"
sys.path.insert(0, str(FIXTURES / "make" / "megatron"))

from megatron_cases import CASES  # noqa: E402
from megatron_versions import environment  # noqa: E402


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A folder, and the job that loads it."""

    name: str
    """unique among loads"""
    folder: Path
    layout: str
    """of the job, e.g. `tp2 pp2`"""
    release: str
    """of megatron-core"""
    truth: Path
    """safetensors file of what the ranks should hold, whole"""
    fused_adam: bool = False
    """the step is kept in the groups, as Apex does"""
    anew: bool = False
    """weights alone, into an optimizer that starts anew"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What became of a load."""

    tensors: int = 0
    """weights, masters and moments compared bit for bit, whole"""
    differences: tuple[str, ...] = ()
    """each that is other than it should be, and how"""
    error: str = ""
    """what the job said where it did not come to an end"""

    @property
    def exact(self) -> bool:
        """Whether something was compared, and all of it equal."""
        return self.tensors > 0 and not self.differences and not self.error


def make_sources(names: Iterable[str], root: Path, *, release: str) -> None:
    """Make `root/<case>/checkpoint` of named cases, and `root/<model>-<layout>.safetensors` of what the ranks held."""
    groups: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for name in names:
        case = CASES[name]
        if case.version != release or case.fused_adam or case.bucket:
            raise ValueError(f"expected a plain case of {release}; got {name}")
        groups[str(case.layout)][case.model][name] = str(root / name / "checkpoint")
    root.mkdir(parents=True, exist_ok=True)
    jobs = [
        {
            "layout": layout,
            "fused_adam": False,
            "save": [
                {"model": model, "cases": cases, "truth": str(root / f"{model}-{layout}.safetensors")}
                for model, cases in models.items()
            ],
        }
        for layout, models in groups.items()
    ]
    if said := _run(jobs, root / "make.json", release):
        raise RuntimeError(f"megatron-core {release} did not make the sources:\n{said}")


def load_all(loads: Iterable[Load], scratch: Path) -> Mapping[str, Loaded]:
    """Load everything; the outcome of each by name. A job that fails takes the later ones of its layout with it."""
    wanted = list(loads)
    if len({load.name for load in wanted}) != len(wanted):
        raise ValueError("expected every load under a name of its own")
    scratch.mkdir(parents=True, exist_ok=True)
    said: dict[str, str] = {}
    for release in sorted({load.release for load in wanted}):
        own = [load for load in wanted if load.release == release]
        said[release] = _run(_groups(own, scratch), scratch / f"load-{release}.json", release)
    return {load.name: _outcome(_result(load, scratch), said[load.release]) for load in wanted}


def _groups(loads: Iterable[Load], scratch: Path) -> list[dict[str, object]]:
    """What the worker is told: loads by layout and Adam."""
    sorted_out: dict[tuple[str, bool], list[dict[str, object]]] = defaultdict(list)
    for load in loads:
        item: dict[str, object] = {"folder": str(load.folder), "truth": str(load.truth)}
        item |= {"result": str(_result(load, scratch)), "anew": load.anew}
        sorted_out[load.layout, load.fused_adam].append(item)
    return [{"layout": layout, "fused_adam": fused, "load": items} for (layout, fused), items in sorted_out.items()]


def _run(jobs: list[dict[str, object]], path: Path, release: str) -> str:
    """Run the jobs with `release`; what they said where something failed, else nothing."""
    path.write_text(json.dumps(jobs))
    command = [sys.executable, str(_HERE / "megatron_worker.py"), str(path)]
    done = subprocess.run(command, env=environment(release), capture_output=True, text=True, check=False)
    return f"{done.stdout}\n{done.stderr}"[-6000:] if done.returncode else ""


def _result(load: Load, scratch: Path) -> Path:
    return scratch / f"{load.name.replace(' ', '-').replace('/', '-')}.result.json"


def _outcome(result: Path, said: str) -> Loaded:
    if not result.exists():
        lines = said.strip().splitlines()[-3:]
        return Loaded(error="\n".join(["not reached: the ranks ended before", *lines]))
    found = json.loads(result.read_text())
    if "error" in found:
        return Loaded(error=found["error"])
    return Loaded(tensors=found["tensors"], differences=tuple(found["differences"]))
