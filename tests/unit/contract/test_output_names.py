"""Names of parameters as paths: what cannot be one is told, and all of it at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ucp.contract.output_names import check_fits, check_named, is_text
from ucp.errors import DestinationError


def refused(*names: str, taken: tuple[str, ...] = ()) -> str:
    """The message for files `zero/<name>/x.pt`; empty when there is none."""
    try:
        check_named([(name, f"zero/{name}/x.pt") for name in names], expected="E", remedy="R", reserved=taken)
    except DestinationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "name", ["a", "a.b", "a/b", "a..b", "...", " ", "a b", "li\nne", "\xe4\U0001f600", "x" * 255, "%2F"]
)
def test_most_names_are_paths(name: str) -> None:
    assert refused(name) == ""


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("", "part '' cannot"),
        (".", "part '.' cannot"),
        ("..", "part '..' cannot"),
        ("a/../../b", "part '..' cannot"),
        ("/tmp/a", "part '' cannot"),
        ("a//b", "part '' cannot"),
        ("a/", "part '' cannot"),
        ("a\0b", "NUL"),
        ("a\ud800b", "surrogates"),
        ("\udc80", "surrogates"),
        ("x" * 256, "a part of its path takes 256 bytes"),
        ("\xe4" * 128, "a part of its path takes 256 bytes"),
        ("/".join(["y" * 200] * 25), "its path takes 5,034 bytes"),
    ],
)
def test_names_that_are_none(name: str, fault: str) -> None:
    message = refused("good", name)
    assert message.startswith("expected E; got 1 that cannot:\n")
    assert fault in message
    assert message.endswith("\nR")
    message.encode()


def test_all_are_told_at_once_and_shortly() -> None:
    message = refused("..", "a", "", "z" * 3000)
    assert message.splitlines()[0] == "expected E; got 3 that cannot:"
    assert len(message) < 500


def test_the_longest_path_is_one() -> None:
    parts = ["y" * 200] * 20
    room = 4095 - len("zero//x.pt") - len("/".join(parts)) - 1
    assert refused("/".join([*parts, "z" * room])) == ""
    assert "4,096 bytes" in refused("/".join([*parts, "z" * (room + 1)]))


def test_folders_may_lie_in_one_another_but_not_in_files() -> None:
    assert refused("a", "a/b", "a/b/c") == ""
    assert "zero/a/x.pt would be a folder of it and a file of 'a'" in refused("a", "a/x.pt")
    assert "zero/s.pt would be a folder of it and a file of the checkpoint itself" in refused(
        "s.pt", taken=("zero/s.pt",)
    )


def test_two_names_of_one_file() -> None:
    with pytest.raises(DestinationError, match=r"'b': f .*'a'"):
        check_named([("a", "f"), ("b", "f")], expected="E", remedy="R")


def test_other_faults_are_told_with_them() -> None:
    with pytest.raises(DestinationError, match=r"(?s)got 2 that cannot:.*'\.\.': .*'a': odd"):
        check_named([("..", "../f"), ("a", "f")], expected="E", remedy="R", faults=[("a", "odd")])


class TestFits:
    def test_what_the_file_system_takes(self, tmp_path: Path) -> None:
        longest = os.pathconf(tmp_path, "PC_NAME_MAX")
        folder = tmp_path / "out.ucp-partial" / "data"
        check_fits(folder, ["a/b", "x" * longest])
        with pytest.raises(DestinationError, match=f"below {folder}; got 1 longer"):
            check_fits(folder, ["a/b", "c/" + "x" * (longest + 1)])

    def test_the_destination_counts(self, tmp_path: Path) -> None:
        room = os.pathconf(tmp_path, "PC_PATH_MAX") - 1 - len(str(tmp_path)) - 1
        path = "/".join(["y" * 200] * ((room - 2) // 201))
        check_fits(tmp_path, [f"{path}/{'z' * (room - len(path) - 1)}"])
        for folder, last in ((tmp_path, room - len(path)), (tmp_path / "sub", room - len(path) - 1)):
            with pytest.raises(DestinationError, match=f"below {folder}; got 1 longer"):
                check_fits(folder, [f"{path}/{'z' * last}"])

    def test_a_name_of_the_destination_that_is_too_long(self, tmp_path: Path) -> None:
        with pytest.raises(DestinationError, match="got 262 bytes"):
            check_fits(tmp_path / ("d" * 250 + ".ucp-partial") / "data", ["a"])


@pytest.mark.parametrize(
    ("name", "text"), [("", True), ("\xe4\U0001f600", True), ("a\ud83d\ude00", False), ("\udfff", False)]
)
def test_text(name: str, text: bool) -> None:
    assert is_text(name) is text
