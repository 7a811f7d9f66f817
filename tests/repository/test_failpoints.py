"""Where a process can lose what it was doing, a failpoint stands; each is registered, used, and in its own role.

The places are found in the sources: every flush and rename of a file, every SQLite COMMIT, every end of a gRPC call.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.fault_plan import ARROWS
from support.repository import SOURCE, modules

import dips.lab.sim.seed_run  # imports every state machine, and so every table  # noqa: F401
from dips.core import machine
from dips.core.observe import failpoints
from dips.core.observe.failpoints import OBEYS, PLACEHOLDERS, TABLES, all_names, expand, transition_name
from dips.protos import clusters_pb2, operator_pb2

ROLES = ("core", "master", "slave", "worker")
SECTIONS = {role: getattr(failpoints, role.upper(), {}) for role in ROLES}
PATTERNS = {pattern for section in SECTIONS.values() for pattern in section}
MACHINERY = SOURCE / "core" / "observe" / "failpoints.py"
FILES = SOURCE / "core" / "files.py"
ROLE_OF_PACKAGE = {role: role for role in ROLES} | {"trainer": "worker"}
MODULES = [path for path in modules() if path.relative_to(SOURCE).parts[0] in ROLE_OF_PACKAGE and path != MACHINERY]

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

FLUSHES = {"os.fsync", "os.fdatasync", "os.replace", "os.rename", "os.link"}
HANDLERS = {"grpc.unary_unary_rpc_method_handler", "grpc.unary_stream_rpc_method_handler"}


@dataclass(frozen=True)
class Use:
    """One call of failpoint(), or one that FILES makes for a place of the caller's. obeyed: its result is used."""

    path: Path
    pattern: str
    obeyed: bool

    @property
    def role(self) -> str:
        return ROLE_OF_PACKAGE[self.path.relative_to(SOURCE).parts[0]]


def functions(tree: ast.Module) -> Iterator[FunctionNode]:
    return (node for node in ast.walk(tree) if isinstance(node, FunctionNode))


def own_nodes(function: FunctionNode) -> Iterator[ast.AST]:
    """Everything in a function except what stands in functions inside it; lambdas belong to it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, FunctionNode)]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def calls_of(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]


def called(call: ast.Call) -> str:
    """The dotted name of what is called; of a getattr(stub, name)(...) the text as it stands."""
    names, node = list[str](), call.func
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    first = node.id if isinstance(node, ast.Name) else ast.unparse(node)  # which takes long
    return ".".join((first, *reversed(names)))


def loses(call: ast.Call, uses_grpc: bool) -> bool:
    """Whether a process that dies around this call has half done something."""
    name = called(call)
    receiver, _, method = name.rpartition(".")
    if name in FLUSHES:
        return True
    if method in ("rename", "replace") and receiver not in ("os", "dataclasses"):
        return len(call.args) == 1 and not call.keywords  # a path's; a text's replace() takes two
    if method == "execute" and call.args and isinstance(call.args[0], ast.Constant):
        return str(call.args[0].value).upper().startswith("COMMIT")
    if not uses_grpc:
        return False
    if receiver in ("context", "call") and method in ("read", "write"):
        return True
    of_a_stub = "stub" in receiver.lower() and method[:1].isupper()
    return of_a_stub or (name.startswith("getattr(") and "stub" in name.lower())


@functools.cache
def edges(tree: ast.Module) -> list[FunctionNode]:
    """The functions in which a failpoint must stand."""
    imports = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    uses_grpc = "grpc" in imports
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    served = {ast.unparse(call.args[0]) for call in calls if called(call) in HANDLERS}
    found = []
    for function in functions(tree):
        nodes = list(own_nodes(function))
        hears = uses_grpc and any(isinstance(node, ast.AsyncFor) for node in nodes)
        lost = any(isinstance(node, ast.Call) and loses(node, uses_grpc) for node in nodes)
        if lost or hears or function.name in served:
            found.append(function)
    return found


def is_failpoint(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and called(node) == "failpoint"


def pattern_of(call: ast.Call) -> str:
    """The name that a call of failpoint() has, with a word in braces for each part that is filled in."""
    match call.args:
        case [ast.Constant(str(name))]:
            return name
        case [ast.JoinedStr(parts)]:
            return "".join(_part(part) for part in parts)
    raise AssertionError(f"a failpoint's name stands in the call: {ast.unparse(call)}")


def _part(part: ast.expr) -> str:
    match part:
        case ast.Constant(text):
            return str(text)
        case ast.FormattedValue(ast.Name(name)):
            return f"{{{name}}}"
    raise AssertionError(f"only a plain name may stand in a failpoint's braces: {ast.unparse(part)}")


def in_files(path: Path) -> Iterator[Use]:
    """The failpoints that a module has in FILES, by the place or the role that it names there, as far as registered."""
    for call in calls_of(path):
        match called(call), [argument.value for argument in call.keywords if argument.arg == "place"], call.args:
            case "replace_file", [ast.Constant(str(place))], _:
                role = place.partition(".")[0]
            case "sync_folder", _, [_, ast.Constant(str(role))]:
                place = ""
            case _:
                continue
        steps = [pattern_of(step) for step in calls_of(FILES) if is_failpoint(step)]
        names = {step.replace("{place}", place).replace("{role}", role) for step in steps}
        yield from (Use(path, name, False) for name in sorted(names & {*all_names()}))


def uses() -> list[Use]:
    found = list[Use]()
    for path in MODULES:
        found += in_files(path)
        if path == FILES:
            continue
        calls = list(filter(is_failpoint, calls_of(path)))
        bare = {id(node.value) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Expr)} if calls else set()
        found += [Use(path, pattern_of(call), id(call) not in bare) for call in calls]
    return found


USES = uses()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_failpoint_stands_wherever_something_can_be_half_done(path: Path) -> None:
    bare = [
        f"{path.relative_to(SOURCE)}:{function.lineno} {function.name}"
        for function in edges(tree_of(path))
        if not any(map(is_failpoint, own_nodes(function)))
    ]
    assert not bare


def test_places_of_every_kind_were_found() -> None:
    found = {path.relative_to(SOURCE).as_posix() for path in MODULES if edges(tree_of(path))}
    assert found >= {"master/journal.py", "core/files.py", "master/rpc.py", "slave/control.py"}
    assert found >= {"slave/disk.py", "worker/control.py"}


def test_each_name_is_registered_once_with_a_sentence() -> None:
    assert sum(map(len, SECTIONS.values())) == len(PATTERNS)
    assert all(sentence.strip() for section in SECTIONS.values() for sentence in section.values())
    assert all(name.startswith(f"{role}.") for role, section in SECTIONS.items() for name in section)


@pytest.mark.parametrize("use", USES, ids=lambda use: f"{use.path.relative_to(SOURCE)}-{use.pattern}")
def test_a_name_that_is_used_is_registered_in_its_role_and_obeyed_as_said(use: Use) -> None:
    names = expand(use.pattern)
    assert set(names) <= set(all_names()), f"register {use.pattern} in core/observe/failpoints.py"
    assert use.role == "core" or use.pattern.startswith((f"{use.role}.", "core.")), "core serves every role"
    obeyed = {name for pattern in OBEYS for name in expand(pattern)}
    assert {name in obeyed for name in names} == {use.obeyed}, "OBEYS says which call sites use the result"


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_a_name_that_is_registered_is_used(pattern: str) -> None:
    assert pattern in {use.pattern for use in USES}


def test_a_word_in_braces_stands_for_the_calls_that_the_services_have() -> None:
    clusters, operators = (
        {method.name for method in module.DESCRIPTOR.services_by_name[name].methods}
        for module, name in ((clusters_pb2, "Clusters"), (operator_pb2, "Operator"))
    )
    assert set(PLACEHOLDERS["master.method"]) == clusters | operators
    assert set(PLACEHOLDERS["worker.method"]) == clusters


def test_state_machines_have_no_failpoints_but_their_arrows() -> None:
    pure = [use for use in USES if "state" in use.path.relative_to(SOURCE).parts]
    assert not pure


def test_every_table_is_known_with_the_role_that_walks_it() -> None:
    found: dict[str, str] = {}
    for path in MODULES:
        for node in calls_of(path):
            if called(node) == "TransitionTable":
                [name, *_] = node.args
                assert isinstance(name, ast.Constant)
                found[str(name.value).replace(" ", "_")] = path.relative_to(SOURCE).parts[0]
    assert found == TABLES


def test_the_transitions_that_faults_are_planned_at_are_in_a_table() -> None:
    """A renamed input would else be noticed only by the long tests, as a fault that never strikes."""
    arrows = {
        transition_name(table.name, start.value, name)
        for table in machine.tables()
        for start, name, _ in table.arrows()
    }
    assert {*ARROWS} <= arrows
