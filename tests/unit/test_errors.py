from __future__ import annotations

import pickle
import traceback
from importlib import import_module
from inspect import signature
from pkgutil import walk_packages

import pytest

import ucp
from ucp import errors

DRAWN = errors.__doc__ or ""


def kinds() -> list[type[errors.UcpError]]:
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.UcpError)]


@pytest.mark.parametrize("kind", kinds())
def test_every_error_is_drawn_and_public(kind):
    assert f" {kind.__name__}" in DRAWN
    assert kind.__name__ in errors.__all__


def test_no_other_module_of_the_core_has_errors_of_its_own():
    modules = [
        import_module(module.name) for module in walk_packages(ucp.__path__, "ucp.") if ".testing" not in module.name
    ]
    own = [f"{kind.__module__}.{kind.__name__}" for kind in errors.UcpError.__subclasses__()]
    assert modules
    assert [name for name in own if name.startswith("ucp.") and not name.startswith("ucp.errors.")] == []


def test_options_that_a_message_names_are_told_in_python_too():
    error = errors.UnknownFamilyError("say which with --family, keep them (--zero-moments keep), or --family again")
    note = "In Python: --family is family=..., --zero-moments is zero_moments=..."
    assert error.__notes__ == [note]
    assert "zero_moments" not in str(error), "the command line shows the message alone"
    assert traceback.format_exception_only(error)[-1] == f"{note}\n"
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.__notes__) == (str(error), error.__notes__)


def test_options_of_others_are_left_alone():
    """Megatron's own flags have no argument, whatever they begin or end with."""
    for text in ("start it with --no-load-optim", "save with --dist-ckpt-optim-fully-reshardable", "a--to b", "---to"):
        assert not hasattr(errors.UcpError(text), "__notes__")
    assert errors.NoSuchNameError("pass --include 'a'").__notes__ == ["In Python: --include is include=..."]


def test_what_is_told_is_an_argument():
    accepted = {**signature(ucp.convert).parameters, **signature(ucp.verify).parameters}
    for option, argument in errors.ARGUMENTS.items():
        name, _, value = argument.partition("=")
        assert name in accepted, option
        assert value in {"...", "{...}"} or eval(value) is (not accepted[name].default)
