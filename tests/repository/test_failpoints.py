"""Each failpoint is registered, used, and in its own role: the faults that are planned at its name strike."""

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
from dips.core.observe.failpoints import PLACEHOLDERS, TABLES, all_names, expand, transition_name
from dips.protos import clusters_pb2, operator_pb2

ROLES = ("core", "master", "slave", "worker")
SECTIONS = {role: getattr(failpoints, role.upper(), {}) for role in ROLES}
PATTERNS = {pattern for section in SECTIONS.values() for pattern in section}
MACHINERY = SOURCE / "core" / "observe" / "failpoints.py"
FILES = SOURCE / "core" / "files.py"
ROLE_OF_PACKAGE = {role: role for role in ROLES} | {"trainer": "worker"}
MODULES = [path for path in modules() if path.relative_to(SOURCE).parts[0] in ROLE_OF_PACKAGE and path != MACHINERY]


@dataclass(frozen=True)
class Use:
    """One call of failpoint(), or one that FILES makes for a place of the caller's."""

    path: Path
    pattern: str

    @property
    def role(self) -> str:
        return ROLE_OF_PACKAGE[self.path.relative_to(SOURCE).parts[0]]


@functools.cache
def calls_of(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


def called(call: ast.Call) -> str:
    """The dotted name of what is called; of a getattr(stub, name)(...) the text as it stands."""
    names, node = list[str](), call.func
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    first = node.id if isinstance(node, ast.Name) else ast.unparse(node)  # which takes long
    return ".".join((first, *reversed(names)))


def is_failpoint(call: ast.Call) -> bool:
    return called(call) == "failpoint"


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
        yield from (Use(path, name) for name in sorted(names & {*all_names()}))


def uses() -> list[Use]:
    found = list[Use]()
    for path in MODULES:
        found += in_files(path)
        if path == FILES:
            continue
        found += [Use(path, pattern_of(call)) for call in calls_of(path) if is_failpoint(call)]
    return found


USES = uses()


@pytest.mark.parametrize("use", USES, ids=lambda use: f"{use.path.relative_to(SOURCE)}-{use.pattern}")
def test_a_name_that_is_used_is_registered_in_its_role(use: Use) -> None:
    assert set(expand(use.pattern)) <= set(all_names()), f"register {use.pattern} in core/observe/failpoints.py"
    assert use.role == "core" or use.pattern.startswith((f"{use.role}.", "core.")), "core serves every role"


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
