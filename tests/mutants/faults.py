"""Small faults in functions: where they can be made, how they read, and the code of a module that has one.

A fault is one change of one place: see _expression() and _statement(). Not changed: messages (f-strings, what is raised
or logged), failpoints, annotations, decorators, asserts and strict=, __repr__, code outside of functions, and functions
that only numba calls.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import CodeType

COMPILED = {"compiled", "njit"}
"""Decorators of functions that numba compiles; their tests run them as Python."""

LEFT_OUT = {"callback", "_intrinsic", "intrinsic", "overload", "type_callable", "lower_builtin", "abstractmethod"}
"""Decorators of functions that nothing calls as Python."""

TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OTHER_SUM: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
OTHER_UNIT = {8: 1, 60: 1, 100: 1, 1000: 1, 1024: 1000, 3600: 60, 10**6: 1000, 10**9: 10**6, 1e-3: 1.0, 1e-6: 1e-3}
OTHER_NAME = {"min": "max", "max": "min", "any": "all", "all": "any"}
IN_ORDER = {"isinstance", "issubclass", "getattr", "hasattr", "setattr", "cast", "range", "zip", "super"}
"""Calls whose arguments are not swapped by mistake, or not without an error at once."""

LOGS = {"debug", "info", "warning", "error", "exception", "critical", "warn", "log"}
"""Methods of what is called log or logger."""

NO_EFFECT = {"failpoint", "log"}
"""Statements that call one of these only log, or are there for tests."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Fault:
    """first, last: lines of which one is executed by whoever meets the fault."""

    path: str
    line: int
    column: int
    operator: str
    number: int
    function: str
    first: int
    last: int
    compiled: bool

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}:{self.column}:{self.operator}" + (f":{self.number}" if self.number else "")

    @property
    def area(self) -> str:
        return self.path.split("/")[2]


@dataclass
class _Edit:
    """One change of a tree, not yet made: in `parent`, the field (an element of it) becomes another node."""

    operator: str
    old: ast.AST
    new: ast.AST
    parent: ast.AST
    field: str
    index: int | None
    function: Function
    name: str
    statement: ast.stmt

    def put(self, node: ast.AST) -> None:
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node

    def make(self) -> None:
        ast.fix_missing_locations(ast.copy_location(self.new, self.old))
        self.put(self.new)

    def text(self) -> str:
        """Before and after, with some of what is around it."""
        if isinstance(self.old, ast.stmt):
            ast.fix_missing_locations(ast.copy_location(self.new, self.old))
            return f"{_short(self.old)} -> {_short(self.new)}"
        around = self.parent if isinstance(self.parent, ast.expr | ast.keyword | ast.Return) else self.old
        before = _short(around)
        self.make()
        after = _short(around if around is self.parent else self.new)
        self.put(self.old)
        return f"{before} -> {after}"


def _short(node: ast.AST) -> str:
    if isinstance(node, ast.If) and isinstance(node.test, ast.Constant) and node.test.value == 0:
        return "(dropped)"
    lines = [line.strip() for line in ast.unparse(node).splitlines()]
    ends = (
        " break"
        if isinstance(node, ast.For | ast.AsyncFor | ast.While) and isinstance(node.body[-1], ast.Break)
        else ""
    )
    return " ".join(lines) if len(lines) <= 2 else f"{lines[0]} ...{ends}"


# ---- for users ----


def faults_of(path: str, text: str) -> list[Fault]:
    """All that can be made in a module, in the order of its lines."""
    seen: Counter[tuple[int, int, str]] = Counter()
    found = []
    for edit in _edits(ast.parse(text)):
        key = (edit.old.lineno, edit.old.col_offset, edit.operator)  # type: ignore[attr-defined]
        compiled = bool(_decorators(edit.function) & COMPILED)
        found.append(Fault(path, *key, seen[key], edit.name, *_reached(edit), compiled))
        seen[key] += 1
    return found


def changed_text(text: str, fault: Fault) -> str:
    return _edit_of(ast.parse(text), fault).text()


def faulty_code(text: str, fault: Fault, file: str) -> CodeType:
    """The module's code with the fault; raises LookupError where the text has no such place."""
    tree = ast.parse(text)
    _edit_of(tree, fault).make()
    code: CodeType = compile(tree, file, "exec", dont_inherit=True)
    return code


def faulty_default(text: str, fault: Fault) -> tuple[str, int | str, object] | None:
    """For a parameter's default: the function, its index among the defaults or its name, and the other value."""
    if fault.operator != "default":
        return None
    edit = _edit_of(ast.parse(text), fault)
    assert isinstance(edit.parent, ast.arguments)
    assert isinstance(edit.new, ast.Constant)
    assert edit.index is not None
    where = edit.index if edit.field == "defaults" else edit.parent.kwonlyargs[edit.index].arg
    return edit.name, where, edit.new.value


def _edit_of(tree: ast.Module, fault: Fault) -> _Edit:
    here = [
        edit for edit in _edits(tree)
        if (edit.old.lineno, edit.old.col_offset, edit.operator) == (fault.line, fault.column, fault.operator)  # type: ignore[attr-defined]
    ]  # fmt: skip
    if fault.number >= len(here):
        raise LookupError(fault.place)
    return here[fault.number]


def _reached(edit: _Edit) -> tuple[int, int]:
    if edit.operator == "default":
        whole = edit.function.body
        return whole[0].lineno, whole[-1].end_lineno or 0
    statement = edit.statement
    body = [*getattr(statement, "body", []), *getattr(statement, "cases", [])]
    if not body:
        return statement.lineno, statement.end_lineno or statement.lineno
    inside = body[0].pattern if isinstance(body[0], ast.match_case) else body[0]
    return statement.lineno, max(statement.lineno, inside.lineno - 1)


# ---- walking ----


def _decorators(function: Function) -> set[str]:
    calls = [node.func if isinstance(node, ast.Call) else node for node in function.decorator_list]
    return {ast.unparse(node).rpartition(".")[2] for node in calls}


def _edits(tree: ast.Module) -> Iterator[_Edit]:
    yield from _inside(tree, "", None, None)


def _inside(node: ast.AST, name: str, function: Function | None, statement: ast.stmt | None) -> Iterator[_Edit]:
    """The edits of a node's children, and of theirs. name: the qualified one, as code objects have it."""
    if isinstance(node, Function):
        if _decorators(node) & LEFT_OUT or node.name == "__repr__":
            return
        function, name = node, f"{name}{node.name}"
        yield from _defaults(node, name)
    elif isinstance(node, ast.ClassDef):
        name = f"{name}{node.name}"
    prefix = (
        f"{name}.<locals>." if isinstance(node, Function) else f"{name}." if isinstance(node, ast.ClassDef) else name
    )
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "args" if isinstance(node, Function) else ""):
            continue
        children = value if isinstance(value, list) else [value]
        for index, child in enumerate(children):
            if not isinstance(child, ast.AST) or _is_left_alone(child):
                continue
            place = index if isinstance(value, list) else None
            here = child if isinstance(child, ast.stmt) else statement
            if function is not None and here is not None:
                owner = name if node is function else name.removesuffix(".<locals>.")
                made = (
                    _statement(child, function, node, index)
                    if isinstance(child, ast.stmt)
                    else _expression(child, node)
                )
                for operator, new in made:
                    yield _Edit(operator, child, new, node, field, place, function, owner, here)
            yield from _inside(child, prefix, function, here)


def _defaults(function: Function, name: str) -> Iterator[_Edit]:
    for field in ("defaults", "kw_defaults"):
        for index, value in enumerate(getattr(function.args, field)):
            if isinstance(value, ast.Constant) and isinstance(value.value, int):
                new = ast.Constant(not value.value if isinstance(value.value, bool) else value.value + 1)
                yield _Edit("default", value, new, function.args, field, index, function, name, function.body[0])


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            return True
        case ast.Expr(value=value) | ast.Expr(value=ast.Await(value=value)):
            return isinstance(value, ast.Constant) or _is_log(value) or _called(value) in NO_EFFECT
        case ast.keyword(arg="strict"):  # of zip: an assertion
            return True
    return _is_log(node)


def _called(node: ast.AST) -> str:
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name
    return ""


def _is_log(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=owner, attr=attr)):
            return (attr in LOGS and "log" in ast.unparse(owner).lower()) or ast.unparse(owner) == "warnings"
    return False


# ---- the changes ----


def _expression(node: ast.AST, parent: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.Compare(left=left, ops=ops, comparators=others):
            for index, op in enumerate(ops):
                turned = TURNED[type(op)]()
                yield "comparison", ast.Compare(left, [*ops[:index], turned, *ops[index + 1 :]], others)
        case ast.Constant(value=bool(value)):
            yield "boolean", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            if isinstance(value, int):
                yield "off-by-one", ast.Constant(value + 1)
            is_factor = isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Mult | ast.Div | ast.FloorDiv)
            if value in OTHER_UNIT and is_factor:
                yield "unit", ast.Constant(type(value)(OTHER_UNIT[value]))
        case ast.BoolOp(op=op, values=values):
            yield "and-or", ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "negated", operand
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OTHER_SUM and not _is_text(left, right):
            yield "arithmetic", ast.BinOp(left, OTHER_SUM[type(op)](), right)
        case ast.Await(value=value):
            yield "await", value
        case ast.Slice(lower=lower, upper=upper, step=step):
            if lower is not None and not _is_number(lower):
                yield "off-by-one", ast.Slice(_plus_one(lower), upper, step)
            if upper is not None and not _is_number(upper):
                yield "off-by-one", ast.Slice(lower, _plus_one(upper), step)
        case ast.Call(func=func, args=args, keywords=keywords):
            yield from _call(func, args, keywords)
    if _is_condition(node, parent) and isinstance(node, ast.expr) and _negates_alone(node):
        yield "negated", ast.UnaryOp(ast.Not(), node)


def _call(func: ast.expr, args: list[ast.expr], keywords: list[ast.keyword]) -> Iterator[tuple[str, ast.AST]]:
    name = ast.unparse(func).rpartition(".")[2]
    if isinstance(func, ast.Name) and func.id in OTHER_NAME:
        yield "min-max", ast.Call(ast.Name(OTHER_NAME[func.id], ast.Load()), args, keywords)
    elif name not in IN_ORDER and not any(isinstance(arg, ast.Starred) for arg in args):
        for index, (one, other) in enumerate(pairwise(args)):
            if type(one) is type(other) and ast.dump(one) != ast.dump(other):
                yield "arguments", ast.Call(func, [*args[:index], other, one, *args[index + 2 :]], keywords)
                break
    if name == "range" and args and not _is_number(args[min(1, len(args) - 1)]):
        last = min(1, len(args) - 1)
        yield "off-by-one", ast.Call(func, [*args[:last], _plus_one(args[last]), *args[last + 1 :]], keywords)


def _statement(node: ast.stmt, function: Function, parent: ast.AST, index: int) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.If(body=[ast.Raise() | ast.Return() | ast.Continue() | ast.Break()], orelse=[]):
            yield "check-removed", _dropped(node)
        case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())) | ast.Delete():
            yield "dropped", _dropped(node)
        case ast.Assign(targets=[target]) | ast.AnnAssign(target=target, value=ast.expr()):
            if _is_second(target, function):
                yield "dropped", _dropped(node)
        case ast.AugAssign(target=target, op=op, value=value):
            yield "dropped", _dropped(node)
            if type(op) in OTHER_SUM and not _is_text(value):
                yield "arithmetic", ast.AugAssign(target, OTHER_SUM[type(op)](), value)
        case ast.For() | ast.AsyncFor() | ast.While():
            copy = type(node)(**{name: getattr(node, name) for name in node._fields})
            copy.body = [*node.body, ast.Break()]
            yield "loop-ends", copy
        case ast.Return(value=ast.expr() as value):
            returns = "" if function.returns is None else ast.unparse(function.returns)
            if returns == "bool" and _negates_alone(value) and not isinstance(value, ast.Constant):
                yield "negated", ast.Return(ast.UnaryOp(ast.Not(), value))
            elif returns.endswith(" | None") and ast.unparse(value) != "None":
                yield "early-return", ast.Return(ast.Constant(None))
    ends = function.returns is not None and ast.unparse(function.returns) == "None"
    if (
        ends
        and parent is function
        and 0 < index < len(function.body) - 1
        and not isinstance(node, Function | ast.ClassDef)
    ):
        yield "early-return", ast.Return()


def _dropped(node: ast.stmt) -> ast.If:
    """Code that is never executed, but still makes names local and a function a generator."""
    return ast.If(ast.Constant(0), [node], [])


def _is_second(target: ast.expr, function: Function) -> bool:
    """Without the assignment there is still a value: what is always an error at once is no small fault."""
    if isinstance(target, ast.Attribute | ast.Subscript):
        return function.name not in ("__init__", "__post_init__")
    if not isinstance(target, ast.Name):
        return False
    args = function.args
    if target.id in {arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)}:
        return True
    stored = (node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return any(node.id == target.id and node.lineno < target.lineno for node in stored)


def _is_condition(node: ast.AST, parent: ast.AST) -> bool:
    match parent:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            return node is test
        case ast.comprehension(ifs=ifs):
            return node in ifs
    return False


def _negates_alone(node: ast.expr) -> bool:
    """Whether no other change of the node is its negation already."""
    match node:
        case ast.UnaryOp(op=ast.Not()) | ast.Constant():
            return False
        case ast.Compare(ops=[op]):
            return isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
    return True


def _is_text(*nodes: ast.expr) -> bool:
    return any(
        isinstance(node, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
        for node in nodes
    )


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant))


def _plus_one(node: ast.expr) -> ast.BinOp:
    return ast.BinOp(node, ast.Add(), ast.Constant(1))


Codes = dict[tuple[int, str], list[CodeType]]


def codes_of(code: CodeType, into: Codes | None = None) -> Codes:
    """The code objects inside of a module's code, by first line and qualified name."""
    into = {} if into is None else into
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            into.setdefault((inner.co_firstlineno, inner.co_qualname), []).append(inner)
            codes_of(inner, into)
    return into
