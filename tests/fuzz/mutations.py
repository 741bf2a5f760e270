"""What is done to a checkpoint: files lost, cut, exchanged, of another run; links and folders in their place; edits."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random

from tests.fuzz.contents import edit_json, edit_pickle, edit_window, flip, flip_text, is_summed


class Kind(StrEnum):
    """What may be asked of who reads it."""

    DAMAGE = "damage"
    """Files or bytes are not those that were written: to be refused, or said, unless nothing is lost."""
    EDIT = "edit"
    """Somebody wrote other values, or there is no checksum: what is there may be taken for what was meant."""
    HARMLESS = "harmless"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """What was done."""

    name: str
    kind: Kind
    files: tuple[str, ...]
    what: str

    @property
    def needs_report(self) -> bool:
        """Whether programs that read the file refuse it, so that `verify` may not call it undamaged."""
        return self.name == "append"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A checkpoint that may be changed."""

    root: Path
    others: tuple[Path, ...]
    is_store: bool

    def files(self) -> list[str]:
        """Its files, in an order that is the same everywhere."""
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file())


Done = tuple[Kind, tuple[str, ...], str]
Way = Callable[[Place, Random], Done | None]


def mutate(place: Place, rng: Random) -> Mutation:
    """Change a checkpoint in one way at random, the likelier ones more often."""
    return _change(place, rng, WAYS)


def damage_output(place: Place, rng: Random) -> Mutation:
    """Damage what a finished conversion wrote, in a way that shows without reading its tensors."""
    return _change(place, rng, OUTPUT_WAYS)


def _change(place: Place, rng: Random, ways: tuple[tuple[Way, int], ...]) -> Mutation:
    while True:
        way = rng.choices([way for way, _ in ways], [weight for _, weight in ways])[0]
        done = way(place, rng)
        if done is not None:
            kind, files, what = done
            return Mutation(name=way.__name__.strip("_"), kind=kind, files=files, what=f"{', '.join(files)}: {what}")


def _pattern(name: str) -> str:
    """The name of a file without its numbers: alike for the same file of all ranks."""
    return "".join("#" if own.isdigit() else own for own in name)


def _flip(place: Place, rng: Random) -> Done | None:
    name = rng.choice(place.files())
    path = place.root / name
    if not path.stat().st_size:
        return None
    kind = Kind.DAMAGE if is_summed(path) else Kind.EDIT
    return kind, (name,), flip(path, rng)


def _cut(place: Place, rng: Random) -> Done | None:
    name = rng.choice(place.files())
    nbytes = (place.root / name).stat().st_size
    if not nbytes:
        return None
    left = rng.choice((0, 1, nbytes // 2, nbytes - 1, rng.randrange(nbytes), max(0, nbytes - rng.randrange(1, 200))))
    os.truncate(place.root / name, left)
    return Kind.DAMAGE, (name,), f"cut to {left} bytes of {nbytes}"


def _lengthen(place: Place, rng: Random) -> Done | None:
    name = rng.choice(place.files())
    path = place.root / name
    if rng.random() < 0.1:
        os.truncate(path, 20 << 30)
        return Kind.DAMAGE, (name,), "made 20 GiB long, sparse"
    more = rng.choice((b"\0", b"\n", bytes(4096), rng.randbytes(100), path.read_bytes()))
    with path.open("ab") as file:
        file.write(more)
    return Kind.DAMAGE, (name,), f"{len(more)} bytes {more[:4].hex()}... added"


def _delete(place: Place, rng: Random) -> Done | None:
    name = rng.choice(place.files())
    path = place.root / name
    if rng.random() < 0.15 and path.parent != place.root:
        shutil.rmtree(path.parent)
        return Kind.DAMAGE, (str(Path(name).parent),), "folder deleted"
    path.unlink()
    return Kind.DAMAGE, (name,), "deleted"


def _alike(place: Place, rng: Random) -> tuple[str, str] | None:
    """Two files of other bytes, most often of two ranks or two states."""
    files = place.files()
    one = rng.choice(files)
    ranks = [own for own in files if own != one and _pattern(own) == _pattern(one)]
    beside = [own for own in files if own != one and Path(own).parent == Path(one).parent]
    others = ranks if ranks and rng.random() < 0.7 else beside if beside and rng.random() < 0.7 else files
    other = rng.choice(others)
    same = (place.root / one).read_bytes() == (place.root / other).read_bytes()
    return None if same else (one, other)


def _duplicate(place: Place, rng: Random) -> Done | None:
    pair = _alike(place, rng)
    if pair is None:
        return None
    shutil.copyfile(place.root / pair[0], place.root / pair[1])
    return Kind.DAMAGE, pair, "the first copied over the second"


def copy_shard(place: Place, rng: Random) -> Done | None:
    """One numbered file over another that differs in its numbers alone: a shard, or the file of a rank."""
    files = place.files()
    alike = [(one, other) for one in files for other in files if one != other and _pattern(one) == _pattern(other)]
    if not alike:
        return None
    pair = rng.choice(alike)
    if (place.root / pair[0]).read_bytes() == (place.root / pair[1]).read_bytes():
        return None
    shutil.copyfile(place.root / pair[0], place.root / pair[1])
    return Kind.DAMAGE, pair, "the first copied over the second"


def _append(place: Place, rng: Random) -> Done | None:
    """Bytes after the end of a pack or a file of safetensors, which that library refuses."""
    names = [name for name in place.files() if name.endswith((".safetensors", ".zst"))]
    names = [name for name in names if not name.startswith("sharded/")]  # consolidated since: nobody reads them
    if not names:
        return None
    name, more = rng.choice(names), rng.randbytes(rng.choice((1, 4, 8, 100)))
    with (place.root / name).open("ab") as file:
        file.write(more)
    return Kind.DAMAGE, (name,), f"{len(more)} bytes {more[:4].hex()}... added"


def flip_name(place: Place, rng: Random) -> Done | None:
    """One bit of a name in the metadata of a distributed checkpoint, which has no checksum."""
    names = [name for name in place.files() if name.endswith(".metadata")]
    if not names:
        return None
    name = rng.choice(names)
    return Kind.DAMAGE, (name,), flip_text(place.root / name, rng)


def stray(place: Place, rng: Random) -> Done | None:
    """A file of torch.save beside a checkpoint that says by other files what it is."""
    if not any(name.startswith(_MARKERS) for name in os.listdir(place.root)):
        return None
    import torch

    buffer = io.BytesIO()
    weights = {"w": torch.ones(3), "b": torch.zeros(2)}
    torch.save(rng.choice((weights, {"state_dict": weights}, {"model": weights, "step": 3})), buffer)
    new = rng.choice(("model.pt", "best.pth", "last.ckpt", "weights.pt", "checkpoint.pt", "ema.ckpt"))
    if (place.root / new).exists():
        return None
    (place.root / new).write_bytes(buffer.getvalue())
    return Kind.HARMLESS, (new,), "a file of torch.save beside the others"


def _flip_index(place: Place, rng: Random) -> Done | None:
    path = place.root / "ucp.json"
    return (Kind.DAMAGE, (path.name,), flip(path, rng)) if path.exists() else None


def _swap(place: Place, rng: Random) -> Done | None:
    pair = _alike(place, rng)
    if pair is None:
        return None
    one, other = (place.root / name for name in pair)
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)
    return Kind.DAMAGE, pair, "exchanged"


def _swap_folders(place: Place, rng: Random) -> Done | None:
    folders = sorted(str(own.relative_to(place.root)) for own in place.root.rglob("*") if own.is_dir())
    pairs = [(a, b) for a in folders for b in folders if a < b and _pattern(a) == _pattern(b)]
    if not pairs:
        return None
    one, other = rng.choice(pairs)
    if not any((place.root / one).iterdir()):
        return None
    (place.root / one).rename(place.root / "aside")
    (place.root / other).rename(place.root / one)
    (place.root / "aside").rename(place.root / other)
    return Kind.DAMAGE, (one, other), "folders exchanged"


def _rename(place: Place, rng: Random) -> Done | None:
    name = rng.choice(place.files())
    path = place.root / name
    digits = [at for at, own in enumerate(path.name) if own.isdigit()]
    at = rng.choice(digits) if digits else 0
    numbered = path.name[:at] + rng.choice("0123456789") + path.name[at + 1 :]
    new = path.with_name(rng.choice((numbered, numbered, f"{path.name}.bak", path.name.upper(), f"x{path.name}")))
    if new.exists():
        return None
    path.rename(new)
    return Kind.DAMAGE, (name,), f"renamed {new.name}"


def _foreign(place: Place, rng: Random) -> Done | None:
    name = rng.choice(place.files())
    there = [own / name for own in place.others if (own / name).is_file()]
    there = [own for own in there if own.read_bytes() != (place.root / name).read_bytes()]
    if not there:
        return None
    other = rng.choice(there)
    shutil.copyfile(other, place.root / name)
    return Kind.DAMAGE, (name,), f"that of {'/'.join(other.parts[-5:])}"


def foreign_link(place: Place, rng: Random) -> Done | None:
    """A whole link or version of another chain, of the same name and iteration."""
    names = [path.name for path in place.root.iterdir() if path.is_dir()] if _is_chain(place) else []
    there = [(other / name, name) for other in place.others for name in names if (other / name).is_dir()]
    there = [(other, name) for other, name in there if other != place.root / name]
    if not there:
        return None
    other, name = rng.choice(there)
    shutil.rmtree(place.root / name)
    shutil.copytree(other, place.root / name)
    return Kind.DAMAGE, (name,), f"that of {'/'.join(other.parts[-2:])}"


def edit_chain(place: Place, rng: Random) -> Done | None:
    """The list of links, the index of a delta, or the header of a window."""
    names = [name for name in place.files() if Path(name).name.startswith(_LISTS)]
    if not names:
        return None
    name = rng.choice(names)
    path = place.root / name
    done = edit_window(path, rng) if name.endswith(".pt") else edit_json(path, rng)
    return None if done is None else (Kind.EDIT, (name,), done)


def _is_chain(place: Place) -> bool:
    return any(Path(name).name.startswith(_LISTS) for name in place.files())


def _something_else(place: Place, rng: Random) -> Done | None:
    """A folder, a pipe, a link to nothing, to itself or to another file, in place of a file."""
    name = rng.choice(place.files())
    path = place.root / name
    what = rng.choice(("folder", "pipe", "link to nothing", "link to itself", "link to another", "link to /dev/zero"))
    pair = _alike(place, rng)
    if what == "link to another" and pair is None:
        return None
    path.unlink()
    match what:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "link to nothing":
            path.symlink_to("nothing")
        case "link to itself":
            path.symlink_to(path.name)
        case "link to another" if pair is not None:
            other = pair[1] if pair[0] == name else pair[0]
            path.symlink_to(place.root / other)
            what = f"link to {other}"
        case _:
            path.symlink_to("/dev/zero")
    return Kind.DAMAGE, (name,), f"a {what} in its place"


def _edit_pickle(place: Place, rng: Random) -> Done | None:
    name = rng.choice(place.files())
    done = edit_pickle(place.root / name, rng)
    return None if done is None else (Kind.EDIT, (name,), done)


def _edit_json(place: Place, rng: Random) -> Done | None:
    names = [own for own in place.files() if own.endswith(".json")]
    name = rng.choice(names) if names else ""
    done = edit_json(place.root / name, rng) if name else None
    if done is None:
        return None
    kind = Kind.DAMAGE if Path(name).parts[:1] == ("extra",) else Kind.EDIT  # the manifest lost its digest: by hand
    return kind, (name,), done


def _edit_tag(place: Place, rng: Random) -> Done | None:
    names = [own for own in place.files() if Path(own).name.startswith("latest")]
    if not names:
        return None
    path = place.root / names[0]
    old = path.read_text()
    new = rng.choice(("", "x", f"{old}\n", "..", "/", "../..", f"{old}9", "a" * 5000, "\0", "\udcff", "-1", "10"))
    path.write_bytes(new.encode(errors="surrogateescape"))
    return Kind.DAMAGE if new.strip() != old.strip() else Kind.HARMLESS, (names[0],), f"{old!r} -> {new[:20]!r}"


def _harmless(place: Place, rng: Random) -> Done | None:
    name = rng.choice(place.files())
    path = place.root / name
    match rng.choice(("link", "more", "folder")):
        case "link" if not place.is_store:
            aside = place.root.parent / "aside"
            aside.mkdir(exist_ok=True)
            there = Path(shutil.copy2(path, aside / path.name))
            path.unlink()
            path.symlink_to(there)
            return Kind.HARMLESS, (name,), "a link to where it lies now"
        case "more":
            new = rng.choice(("notes.txt", ".DS_Store", "events.out.tfevents.1", "README.md", "._x", "x.tmp"))
            folder = rng.choice((path.parent, place.root))
            (folder / new).write_bytes(b"notes")
            return Kind.HARMLESS, (new,), "a file of notes beside the others"
        case "folder":
            (path.parent / "tensorboard").mkdir()
            return Kind.HARMLESS, ("tensorboard",), "an empty folder beside the files"
    return None


WAYS: tuple[tuple[Way, int], ...] = (
    (_flip, 6),
    (_edit_pickle, 5),
    (_edit_json, 4),
    (_cut, 3),
    (_delete, 3),
    (_duplicate, 3),
    (_swap, 3),
    (_foreign, 3),
    (_something_else, 3),
    (_lengthen, 2),
    (_rename, 2),
    (_harmless, 2),
    (flip_name, 3),
    (copy_shard, 2),
    (_append, 2),
    (stray, 2),
    (_swap_folders, 1),
    (_edit_tag, 1),
    (edit_chain, 4),
    (foreign_link, 1),
)
"""Each with how often it is taken."""
OUTPUT_WAYS: tuple[tuple[Way, int], ...] = ((_delete, 3), (_cut, 3), (_append, 2), (_flip_index, 1))
"""The same, of what a conversion wrote."""
_LISTS = ("chain.json", "window_rank", "model.safetensors.index.json", "ucp-delta")
"""Beginnings of names of files that say what a chain, a window or a delta holds."""
_MARKERS = ("chain.json", "window_rank", "latest", ".metadata", "__0.metadata", "config.json", "model", "ucp.json")
"""Beginnings of names that say what a folder holds: `latest_checkpointed_iteration.txt`, `model.safetensors`."""
