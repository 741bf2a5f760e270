from __future__ import annotations

from importlib import import_module
from pkgutil import walk_packages

import pytest

import ucp
from ucp import errors


def kinds() -> list[type[errors.UcpError]]:
    return [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.UcpError)]


@pytest.mark.parametrize("kind", kinds())
def test_every_error_is_public(kind):
    assert kind.__name__ in errors.__all__


def test_no_other_module_of_the_core_has_errors_of_its_own():
    modules = [
        import_module(module.name) for module in walk_packages(ucp.__path__, "ucp.") if ".testing" not in module.name
    ]
    own = [f"{kind.__module__}.{kind.__name__}" for kind in errors.UcpError.__subclasses__()]
    assert modules
    assert [name for name in own if name.startswith("ucp.") and not name.startswith("ucp.errors.")] == []
