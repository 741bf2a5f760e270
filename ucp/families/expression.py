"""Whole-number expressions over named values: block lengths, sizes of a model, and the conditions of rules.

An expression is a line of text in a family file. It knows whole numbers, names, texts, `+ - * / // %`, comparisons,
`and or not`, `a if b else c`, `min()`, `max()`, and `name[0]` for the length of dim 0 of a named tensor. `/` must leave
no remainder. Nothing else is understood, and nothing is executed.

>>> Expression("heads * head_dim / tp").value({"heads": 8, "head_dim": 64, "tp": 2})
256
>>> sorted(Expression("groups if grouped else heads").names)
['grouped', 'groups', 'heads']
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

_MOST = 1 << 63
"""Bound of every number: no size of a model is as large, and products cannot grow further."""

_ARITHMETIC: Mapping[type[ast.operator], Callable[[int, int], int]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
    }
)

_ORDER: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = MappingProxyType(
    {
        ast.Lt: operator.lt,
        ast.LtE: operator.le,
        ast.Gt: operator.gt,
        ast.GtE: operator.ge,
    }
)

_FUNCTIONS: Mapping[str, Callable[[Sequence[int]], int]] = MappingProxyType({"min": min, "max": max})


class ExpressionError(ValueError):
    """An expression that cannot be understood, or has no whole number as its value."""


class UnknownNameError(ExpressionError):
    """A value that the expression needs is not known."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression. Raises ExpressionError if the text is not an expression."""

    text: str
    """As it was written."""
    _tree: ast.expr = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            tree = ast.parse(self.text.strip(), mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise ExpressionError(f"expected an expression such as 'heads * head_dim'; got {self.text!r}") from error
        object.__setattr__(self, "_tree", tree)
        for node in ast.walk(tree):
            _check(node, self.text)

    @property
    def names(self) -> frozenset[str]:
        """Names that its value may depend on."""
        called = {id(node.func) for node in ast.walk(self._tree) if isinstance(node, ast.Call)}
        return frozenset(
            node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name) and id(node) not in called
        )

    def value(self, values: Mapping[str, object]) -> int:
        """Its value, a whole number; a condition is 1 or 0.

        `values`: name to whole number, text, None, or sequence of lengths. Raises UnknownNameError, ExpressionError.
        """
        try:
            return _to_int(_evaluate(self._tree, values), self.text)
        except UnknownNameError:
            raise
        except (ExpressionError, ZeroDivisionError, OverflowError) as error:
            raise ExpressionError(f"{self.text!r}: {error}") from error

    def try_value(self, values: Mapping[str, object]) -> int | None:
        """Its value, or None if it has none with these values."""
        try:
            return self.value(values)
        except ExpressionError:
            return None

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> tuple[type[Expression], tuple[str]]:
        return Expression, (self.text,)


_KNOWN = (
    *(ast.Name, ast.Load, ast.IfExp, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp),
    *(ast.operator, ast.Compare, ast.cmpop, ast.Call, ast.Subscript),
)


def _check(node: ast.AST, text: str) -> None:
    """Refuse what the module docstring does not list."""
    known = isinstance(node, _KNOWN)
    if isinstance(node, ast.Constant):
        known = node.value is None or isinstance(node.value, int | str)
        if isinstance(node.value, int):
            _to_int(node.value, "a number")
    elif isinstance(node, ast.Call) and not node.args:
        raise ExpressionError(f"expected one number or more for {ast.unparse(node)} in the expression {text!r}")
    elif isinstance(node, ast.Call):
        known = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
    elif isinstance(node, ast.Subscript):
        known = isinstance(node.value, ast.Name) and isinstance(node.slice, ast.Constant)
    elif isinstance(node, ast.operator):
        known = type(node) in _ARITHMETIC or isinstance(node, ast.Div)
    elif isinstance(node, ast.cmpop):
        known = type(node) in _ORDER or isinstance(node, ast.Eq | ast.NotEq)
    if not known:
        raise ExpressionError(f"{type(node).__name__} is not understood in the expression {text!r}")


def _evaluate(node: ast.expr, values: Mapping[str, object]) -> object:
    """Value of one node; `and`, `or` and `if` evaluate only what they need."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return _look_up(node.id, values)
        case ast.IfExp():
            return _evaluate(node.body if _evaluate(node.test, values) else node.orelse, values)
        case ast.BoolOp():
            return _evaluate_bool(node, values)
        case ast.UnaryOp(op=ast.Not()):
            return not _evaluate(node.operand, values)
        case ast.Compare():
            return _compare(node, values)
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int(dim))):
            shape = _look_up(name, values)
            if not isinstance(shape, Sequence) or isinstance(shape, str) or not 0 <= dim < len(shape):
                raise UnknownNameError(f"{name}[{dim}]")
            return shape[dim]
        case ast.UnaryOp():
            return -_to_int(_evaluate(node.operand, values), "-")
        case ast.BinOp():
            return _evaluate_arithmetic(node, values)
        case ast.Call(func=ast.Name(id=name)):
            return _FUNCTIONS[name]([_to_int(_evaluate(argument, values), name) for argument in node.args])
    raise ExpressionError(f"{ast.unparse(node)} is not understood")


def _look_up(name: str, values: Mapping[str, object]) -> object:
    if name not in values:
        raise UnknownNameError(name)
    return values[name]


def _evaluate_bool(node: ast.BoolOp, values: Mapping[str, object]) -> object:
    wanted = isinstance(node.op, ast.Or)
    last: object = not wanted
    for operand in node.values:
        last = _evaluate(operand, values)
        if bool(last) is wanted:
            break
    return last


def _evaluate_arithmetic(node: ast.BinOp, values: Mapping[str, object]) -> int:
    first, second = (_to_int(_evaluate(side, values), ast.unparse(side)) for side in (node.left, node.right))
    if isinstance(node.op, ast.Div):
        quotient, rest = divmod(first, second)
        if rest:
            raise ExpressionError(f"{first} is not a multiple of {second}")
        return quotient
    return _ARITHMETIC[type(node.op)](first, second)


def _compare(node: ast.Compare, values: Mapping[str, object]) -> bool:
    sides = [_evaluate(side, values) for side in (node.left, *node.comparators)]
    for op, first, second in zip(node.ops, sides, sides[1:], strict=False):
        if isinstance(op, ast.Eq | ast.NotEq):
            if not all(isinstance(side, int | float | str | None) for side in (first, second)):
                raise ExpressionError("expected numbers or texts to be compared")
            holds = (first == second) is isinstance(op, ast.Eq)
        else:
            holds = _ORDER[type(op)](_to_int(first, "<"), _to_int(second, "<"))
        if not holds:
            return False
    return True


def _to_int(value: object, where: str) -> int:
    if isinstance(value, int) and -_MOST <= value < _MOST:
        return int(value)
    got = f"one of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    raise ExpressionError(f"expected a whole number of 64 bits for {where}; got {got}")
