"""Writes the generated parts of docs/protocol.md: versions, refusals, calls, and each transition table as a diagram.

A part is between `<!-- generated: NAME -->` and `<!-- end -->`; a test checks that the file is current.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor

from dips.cli.generated_page import keep_current
from dips.core.errors import ConfigError
from dips.core.machine import TransitionTable
from dips.core.protocol import CAPABILITIES, PROTOCOL_MIN, PROTOCOL_VERSION
from dips.master.state.records import PUSH_TABLE, RECOVERY_TABLE, RESHARD_TABLE, ROUND_TABLE, SLAVE_TABLE
from dips.protos import clusters_pb2, operator_pb2, slaves_pb2
from dips.slave.state.shard import SAVE_TABLE, SHARD_TABLE
from dips.slave.state.slave import LINK_TABLE
from dips.worker.state.shared import SESSION_TABLE

TABLES: dict[str, TransitionTable[Any]] = {
    "round": ROUND_TABLE,
    "push": PUSH_TABLE,
    "slave": SLAVE_TABLE,
    "recovery": RECOVERY_TABLE,
    "reshard": RESHARD_TABLE,
    "slave-link": LINK_TABLE,
    "slave-shard": SHARD_TABLE,
    "slave-save": SAVE_TABLE,
    "session": SESSION_TABLE,
}

_PART = re.compile(r"(<!-- generated: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def diagram(table: TransitionTable[Any]) -> str:
    """The table as a Mermaid state diagram; arrows between the same two phases share one line."""
    labels: dict[tuple[str, str], list[str]] = {}
    for start, name, end in table.arrows():
        labels.setdefault((start.value, end.value), []).append(name.replace("_", " "))
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {table.initial.value}"]
    lines += [f"    {start} --> {end}: {', '.join(names)}" for (start, end), names in sorted(labels.items())]
    return "\n".join([*lines, "```"])


def versions() -> str:
    capabilities = ", ".join(f"`{name}`" for name in sorted(CAPABILITIES))
    return f"Protocol version {PROTOCOL_VERSION}, understood from {PROTOCOL_MIN} on. Capabilities: {capabilities}."


def refusals() -> str:
    """The refusal codes with the sentences that protos/common.proto gives them."""
    text = (Path(__file__).resolve().parent.parent / "protos" / "common.proto").read_text()
    rows = re.findall(r"^  REFUSAL_(\w+) = (\d+);\s+// \"(.*)\"$", text, re.MULTILINE)
    body = [f"| {number} | `{name}` | {sentence} |" for name, number, sentence in rows]
    return "\n".join(["| code | name | what it says |", "|---|---|---|", *body])


def calls() -> str:
    services: list[ServiceDescriptor] = [
        module.DESCRIPTOR.services_by_name[name]
        for module, name in ((clusters_pb2, "Clusters"), (slaves_pb2, "Slaves"), (operator_pb2, "Operator"))
    ]
    rows = [
        f"| {service.name} | `{method.name}` | {_arrow(method)} |" for service in services for method in service.methods
    ]
    return "\n".join(["| service | call | request and answer |", "|---|---|---|", *rows])


def _arrow(method: Any) -> str:
    up = ("stream of " if method.client_streaming else "") + method.input_type.name
    down = ("stream of " if method.server_streaming else "") + method.output_type.name
    return f"{up} → {down}"


PARTS: dict[str, Callable[[], str]] = {
    "versions": versions,
    "refusals": refusals,
    "calls": calls,
    **{name: functools.partial(diagram, table) for name, table in TABLES.items()},
}


def render(text: str) -> str:
    """The document with every generated part made again. Raises ConfigError for an unknown or a missing part."""
    found = [match.group(2) for match in _PART.finditer(text)]
    if sorted(found) != sorted(PARTS):
        odd = sorted(set(found) ^ set(PARTS)) or sorted({name for name in found if found.count(name) > 1})
        raise ConfigError(f"the document's generated parts are not those that exist; look at: {', '.join(odd)}")
    return _PART.sub(lambda match: f"{match.group(1)}{PARTS[match.group(2)]()}\n{match.group(3)}", text)


def main() -> int:
    return keep_current(__doc__, render)


if __name__ == "__main__":
    sys.exit(main())
