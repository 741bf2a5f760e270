"""Format `moevement`: a sparse window, read together with the dense checkpoint with which it was saved.

1. Read the file of every rank. The files name operators by stage, layer and local number; the dense checkpoint in the
   folder above says which modules these are.
2. Each rank has one range of every flattened master (ZeRO-1). The ranges of the ranks that share a partition follow one
   another.
3. An iteration of the window is a link of a chain (`ucp.chain.window`), and the window is read like one: every
   parameter from its *slot*, the iteration in which it is active, because only there its master and moments are saved.
   So parameters are of different iterations (`AtomIndex.iteration`). Step counts are not saved. If no step can have
   been skipped (no dynamic loss scale), the step count of a parameter is its iteration.

   With `--at` the first iteration of the window, the result is the weights of that iteration: masters of the operators
   that were active then, the others in the dtype of the model. A window holds nothing else of a single iteration.

A file has no checksum. So two faults are looked for:

* The window was saved after its last step. Buffers are reused while they are saved, so the file holds bytes of later
  iterations under earlier ones.
* With data parallelism, a rank saved its peer's bytes, for the same reason. Such a range is nearer to the peer's place
  in the dense checkpoint than to its own.

"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ucp.chain.merge import LinkIndex, merge
from ucp.contract.locating import Evidence
from ucp.contract.protocols import Format, SourceOptions
from ucp.contract.registry import recognise
from ucp.core.index import STEP, WEIGHT, AtomIndex, Index, ParamGroup
from ucp.errors import (
    MalformedError,
    MissingFileError,
    SourceError,
    UnsupportedError,
    UsageError,
    format_count,
    format_list,
)
from ucp.io.folder import names_in, to_absolute
from ucp.io.provenance import source_file
from ucp_formats.moevement.atoms import SAMPLED, WindowReader
from ucp_formats.moevement.names import OperatorNames
from ucp_formats.moevement.window import RankWindow, check_adjacent, engine_steps, rank_of, read_window

_PROVED = (
    "a window has no checksums. What is proved: that its tensors have the lengths, names and shapes of the dense "
    f"checkpoint, and that no rank holds a peer's range (by {SAMPLED} elements of each). Not proved: every byte"
)


@dataclass(frozen=True, slots=True)
class MoEvementFormat(Format):
    """Reads sparse windows."""

    options: SourceOptions = field(default_factory=SourceOptions)
    """`at`: iteration to read."""

    name = "moevement"
    takes_time = True

    def detect(self, path: Path) -> Evidence | None:
        """Detect a folder with the files of a window, or one of these files."""
        root = path.parent if rank_of(path.name) is not None and path.is_file() else path
        ranks = [name for name in names_in(root) if rank_of(name) is not None]
        return Evidence(root, (f"window_rank*.pt of {format_count(len(ranks), 'rank')}",)) if ranks else None

    def owns(self, name: str) -> bool:
        """Whether MoEvement gives this name to a rank's window."""
        return rank_of(name) is not None

    def configured(self, options: SourceOptions) -> MoEvementFormat:
        """The same format, which reads the iteration in `options`."""
        if options.without_family() != SourceOptions(at=options.at) or options.family or options.patterns:
            return super().configured(options)  # type: ignore[return-value]  # it raises
        return MoEvementFormat(options)

    def read(self, path: Path) -> Index:
        """Index of the window. Raises SourceError, UsageError."""
        links = self._read(path)
        first, last = links[0], links[-1].index
        at = self.options.at
        if at is None:
            is_counted = all(
                STEP in atom.states for link in links for atom in link.index.atoms.values() if not atom.is_cast
            )
            index = replace(merge(links, path=last.path, evidence=last.evidence), format=self.name)
            return replace(index, notes=(*last.notes, *_describe_mixed(first.iteration, index, is_counted=is_counted)))
        if at != first.iteration:
            raise UsageError(
                f"expected --at {first.iteration}, the first iteration of the window {last.path}, or no --at; got "
                f"{at}. A window holds all weights of its first iteration, and some parameters of each one to "
                f"{last.step}"
            )
        atoms = {name: replace(atom, states={WEIGHT: atom.states[WEIGHT]}) for name, atom in first.index.atoms.items()}
        return replace(first.index, atoms=atoms)

    def read_links(self, path: Path) -> tuple[LinkIndex, ...]:
        """What the window holds of each iteration up to that in the options, without the learning rate: see groups.

        Groups are those of the step at which the window was saved, so their learning rate is of another iteration.
        """
        return tuple(
            LinkIndex(link.iteration, replace(link.index, groups=tuple(map(_without_lr, link.index.groups))))
            for link in self._read(path)
            if self.options.at is None or link.iteration <= self.options.at
        )

    def _read(self, path: Path) -> tuple[LinkIndex, ...]:
        """What the window holds of each iteration. Raises SourceError."""
        root = path if path.is_dir() else path.parent
        windows = _read_ranks(root)
        first, last = _check_iterations(windows)
        unchecked = (*_check_boundary(windows), _PROVED)
        dense = _read_dense(root)
        reader = WindowReader(windows, OperatorNames.of(dense, windows), dense)
        of_peers = list(reader.check_peers())
        if of_peers:
            raise MalformedError(
                f"expected ranges of every rank itself in {root}; compared with the dense checkpoint beside it, these "
                f"are of a data-parallel peer:\n{format_list(of_peers)}\nMoEvement copied the peer's bytes into "
                "buffers that were still to be saved, or files were exchanged. Convert the dense checkpoint"
            )
        atoms = reader.read_links()
        _check_complete(dense, atoms, root, first)
        for window in windows:
            check_adjacent(window)
        common = replace(
            dense,
            path=to_absolute(root),
            format=self.name,
            evidence=(f"window_rank*.pt of {format_count(len(windows), 'rank')}", f"iterations {first} to {last}"),
            files=tuple(source_file(window.path, f"sparse window of rank {window.rank}") for window in windows),
            records=(),
            notes=unchecked,
            unchecked=unchecked,
            dropped=(),
            lost={},
            doubts=(),
            keys=None,
        )

        def make_link(iteration: int) -> LinkIndex:
            of_link = atoms.get(iteration, {})
            ordered = {name: of_link[name] for name in dense.atoms if name in of_link}
            extras = tuple(reader.list_extras(iteration))
            return LinkIndex(iteration, replace(common, step=iteration, atoms=ordered, extras=extras))

        return tuple(map(make_link, range(first, last + 1)))


def _without_lr(group: ParamGroup) -> ParamGroup:
    return replace(group, hyper={key: value for key, value in group.hyper.items() if key != "lr"})


def _read_ranks(root: Path) -> list[RankWindow]:
    """The windows of all ranks, in order. Raises MissingFileError if a rank's is missing."""
    ranks = {rank: name for name in names_in(root) if (rank := rank_of(name)) is not None}
    absent = [f"window_rank{rank}.pt" for rank in range(max(ranks) + 1) if rank not in ranks]
    if absent:
        raise MissingFileError(f"expected the window of every rank in {root}; missing:\n{format_list(absent)}")
    return [read_window(root / ranks[rank]) for rank in sorted(ranks)]


def _check_iterations(windows: Sequence[RankWindow]) -> tuple[int, int]:
    """First and last iteration. Raises MalformedError if ranks differ, UnsupportedError if windows are empty."""
    iterations = {tuple(stored.iteration for stored in window.document.iterations): window for window in windows}
    if len(iterations) > 1:
        lines = (f"{window.path}: {list(steps)}" for steps, window in iterations.items())
        raise MalformedError(f"expected the same iterations in the windows of all ranks; got\n{format_list(lines)}")
    ((steps, window),) = iterations.items()
    if not steps:
        raise UnsupportedError(
            f"{window.path} holds no iteration yet: the first window is saved two windows after the start of a run. "
            "Convert the dense checkpoint beside it"
        )
    return steps[0], steps[-1]


def _check_boundary(windows: Sequence[RankWindow]) -> list[str]:
    """A note if files do not say when they were saved. Raises MalformedError if buffers already held later bytes."""
    unknown = []
    for window in windows:
        steps, boundary = engine_steps(window)
        if steps is None or boundary is None:
            unknown.append(window.path)
        elif steps != boundary:
            raise MalformedError(
                f"expected {window.path} to be saved after step {boundary}, the last of a window; it was saved after "
                f"{steps}. MoEvement reuses the buffers of a window while it saves them, so the file holds bytes of "
                "later iterations under earlier ones. Convert the dense checkpoint beside it"
            )
    if not unknown:
        return []
    files = format_count(len(unknown), "file of the window does not record", "files of the window do not record")
    return [f"{files} the step of the save, so later iterations may have overwritten bytes: ucp cannot check that"]


def _read_dense(root: Path) -> Index:
    """The dense checkpoint in the folder above that of a window. Raises MissingFileError."""
    folder = root.absolute().parent
    try:
        fmt, _ = recognise(folder)
        return fmt.read(folder)
    except SourceError as error:
        raise MissingFileError(
            f"{root} can only be read together with the dense checkpoint in the folder above, which says which modules "
            f"have experts: {error}"
        ) from error


def _check_complete(dense: Index, links: Mapping[int, Mapping[str, AtomIndex]], root: Path, first: int) -> None:
    """Raise MalformedError if the window lacks a parameter of the dense checkpoint, or has it in another shape."""
    full = {name: atom for atoms in links.values() for name, atom in atoms.items() if not atom.is_cast}
    wrong = [
        f"{name}: {'missing' if name not in atoms else list(atoms[name].global_shape)}, expected "
        f"{list(atom.global_shape)}"
        for atoms in (full, links.get(first, {}))
        for name, atom in dense.atoms.items()
        if name not in atoms or atoms[name].global_shape != atom.global_shape
    ]
    wrong += [f"{name}: unknown to the dense checkpoint" for name in full if name not in dense.atoms]
    if wrong:
        raise MalformedError(
            f"expected every parameter of {dense.path} in the window {root}; got\n{format_list(dict.fromkeys(wrong))}"
        )


def _describe_mixed(first: int, index: Index, *, is_counted: bool) -> Iterator[str]:
    yield (
        f"parameters are of iterations {first} to {index.step}: each is from the iteration in which it was active. A "
        "state of a single iteration requires a replay of these iterations (ucp.densify)"
    )
    if is_counted:
        yield "step counts are taken from the iterations, because a run without a dynamic loss scale skips no step"
    else:
        yield "step counts are not saved, and the run may have skipped steps: a run that resumes counts from 0"
