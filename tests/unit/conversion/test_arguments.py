"""What public functions that take options say of their arguments."""

from __future__ import annotations

import inspect

import pytest

import ucp
from ucp.conversion.arguments import ConvertArguments, SourceArguments, takes_options
from ucp.conversion.options import OPTIONS
from ucp.errors import UcpError


def notes_of(text: str, arguments=ConvertArguments) -> list[str]:
    """Notes of an error with that message, raised by a function that takes these options."""

    def function(**options):
        raise UcpError(text)

    with pytest.raises(UcpError) as caught:
        takes_options(arguments)(function)()
    assert str(caught.value) == text, "the command line shows the message alone"
    return getattr(caught.value, "__notes__", [])


def test_options_that_a_message_names_are_told_in_python_too():
    text = "say which with --family, keep them (--zero-moments keep), or --family again; --no-fsync, --set, --overwrite"
    assert notes_of(text) == [
        (
            "In Python: --family is family=..., --zero-moments is zero_moments=..., --no-fsync is fsync=False, "
            "--set is settings={...}, --overwrite is overwrite=True"
        )
    ]


def test_options_of_others_are_left_alone():
    """Megatron's own flags have no argument, whatever they begin or end with; nor has a function all options."""
    for text in ("start it with --no-load-optim", "save with --dist-ckpt-optim-fully-reshardable", "a--to b", "---to"):
        assert notes_of(text) == []
    assert notes_of("pass --family or --drift", SourceArguments) == ["In Python: --family is family=..."]


@pytest.mark.parametrize("function", [ucp.convert, ucp.plan, ucp.verify, ucp.load_into])
def test_arguments_are_in_the_signature(function):
    parameters = inspect.signature(function).parameters
    assert not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    assert all(OPTIONS[name].default == own.default for name, own in parameters.items() if name in OPTIONS) or (
        function is ucp.load_into
    )


def test_help_explains_every_argument():
    text = inspect.getdoc(ucp.convert) or ""
    assert all(f"\n{name}\n    " in text for name in inspect.signature(ucp.convert).parameters if name in OPTIONS)
