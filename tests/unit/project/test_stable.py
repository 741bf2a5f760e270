"""Names that a release had are there: docs/reference/stability.md promises it.

After a release, `python -m tests.unit.project.test_stable > tests/unit/project/stable-VERSION.json` notes its names.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import click
import pytest

import ucp
import ucp.errors
from ucp_cli.verbs import cli

RELEASES = sorted(Path(__file__).parent.glob("stable-*.json"))


def public(value: object) -> list[str]:
    """Public names of a class."""
    return sorted(name for name in dir(value) if not name.startswith("_"))


def options(command: click.Command, verb: str = "") -> dict[str, list[str]]:
    """Verbs to the options and arguments that they take."""
    names = {verb or "ucp": sorted(name for own in command.params for name in (*own.opts, *own.secondary_opts))}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            names |= options(command.get_command(context, name) or command, f"{verb} {name}".strip())
    return names


def stable_names() -> dict[str, dict[str, list[str]]]:
    """Kind to owner to names: what the page calls stable."""
    values = {name: getattr(ucp, name) for name in ucp.__all__}
    functions = {name: value for name, value in values.items() if inspect.isfunction(value)}
    errors = {name: kind for name, kind in vars(ucp.errors).items() if inspect.isclass(kind)}
    return {
        "functions": {name: list(inspect.signature(value).parameters) for name, value in functions.items()},
        "members": {name: public(value) for name, value in values.items() if inspect.isclass(value)},
        "replay": {"ucp.replay": list(ucp.replay.__all__)},
        "errors": {name: [base.__name__ for base in kind.__mro__[1:-1]] for name, kind in errors.items()},
        "commands": options(cli),
    }


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.stem)
def test_no_name_of_a_release_is_gone(release: Path) -> None:
    now = stable_names()
    gone = [
        f"{kind}: {owner} {name}"
        for kind, owners in json.loads(release.read_text()).items()
        for owner, names in owners.items()
        for name in names.split()
        if name not in now[kind].get(owner, ())
    ]
    assert gone == []


if __name__ == "__main__":
    lines = {
        kind: {owner: " ".join(names) for owner, names in owners.items()} for kind, owners in stable_names().items()
    }
    print(json.dumps(lines, indent=1))  # a script
