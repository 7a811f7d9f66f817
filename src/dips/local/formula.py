"""Computes a quantity from the text of the formula that is shown, so that the two cannot disagree.

A formula is a sum of products in Python's notation over names and numbers, with min, max and ceil. It must never be
more than that: nothing is called, looked up or compared but what is listed here.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_OPERATIONS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_FUNCTIONS: Mapping[str, Callable[..., float]] = {"min": min, "max": max, "ceil": math.ceil}

CONSTANTS: Mapping[str, float] = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True)
class Quantity:
    """One number with its formula. numbers: what was put in, by the formula's names, in their order.

    unit: "bytes", "s", "bits/s", "share" (of one) or "" (a count). note: where it is used, or what is not in it.
    """

    key: str
    what: str
    unit: str
    formula: str
    numbers: Mapping[str, float]
    value: float
    note: str = ""

    @property
    def whole(self) -> int:
        """Rounded up, for who needs a whole number of bytes or parameters."""
        return math.ceil(self.value)


def names_of(formula: str) -> list[str]:
    """The names that a formula needs numbers for, in the order of the text."""
    nodes = (node for node in ast.walk(_parsed(formula)) if isinstance(node, ast.Name))
    ordered = sorted(nodes, key=lambda node: node.col_offset)
    return [
        name for name in dict.fromkeys(node.id for node in ordered) if name not in _FUNCTIONS and name not in CONSTANTS
    ]


def value_of(formula: str, numbers: Mapping[str, float]) -> float:
    """Compute a formula. Raises ValueError for a text that is no formula, KeyError for a name without a number."""
    return _value(_parsed(formula), {**CONSTANTS, **numbers})


def _parsed(formula: str) -> ast.expr:
    try:
        return ast.parse(formula, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{formula!r} is not a formula") from error


def _value(node: ast.expr, numbers: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.Name(id=name):
            return numbers[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left, numbers), _value(right, numbers))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_value(argument, numbers) for argument in arguments))
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is not part of a formula")
