"""What the product does is counted, what a test makes itself is not; notes of many processes are read together."""

from __future__ import annotations

import re

import pytest
from support.master_bench import Bench
from support.repository import SOURCE, modules

from dips.core.errors import RefusalCode, Refused
from dips.core.machine import MachineHistory, Phase
from dips.core.net.data_header import DataHeader
from dips.lab.sim.seen import Seen, refuses, report
from dips.master.state.records import SLAVE_TABLE, SlavePhase

HELLO = ("slave", "ABSENT", "hello", "ATTACHED")


def refuse() -> None:
    with pytest.raises(Refused):
        DataHeader.decode(b"\xff")


def test_transitions_and_refusals_are_counted_while_watched() -> None:
    seen = Seen()
    with seen.watching():
        Bench().running("a")
        refuse()
        Refused(RefusalCode.KEY, "a test made it")
    refuse()
    assert seen.arrows[HELLO] == 2, "two slaves"
    assert dict(seen.refusals) == {"MALFORMED": 1}
    twice = Seen()
    twice.add(seen)
    twice.add(seen)
    assert (twice.arrows[HELLO], twice.refusals["MALFORMED"]) == (4, 2)


def test_the_report_counts_what_was_seen_and_lists_what_never_was() -> None:
    seen = Seen()
    with seen.watching():
        Phase(SLAVE_TABLE, MachineHistory()).move("hello", SlavePhase.ATTACHED, 0.0)
        refuse()
    _, row, never, refusals = report(seen, [SLAVE_TABLE])
    assert row == "  slave: ABSENT > ATTACHED upon hello 1"
    assert never.startswith(f"transitions never taken: {len(SLAVE_TABLE.arrows()) - 1} (slave ATTACHED > ABSENT upon ")
    assert refusals.startswith("refusals raised: MALFORMED 1; never: PROTOCOL_VERSION, RUN_ID, ")
    assert "UNSPECIFIED" not in refusals


def test_every_module_of_the_product_that_refuses_is_counted() -> None:
    # The simulator's hosts refuse in the place of real ones; refusals of a peer are only passed on, also what a master
    # would say that lets no process in without keys.
    passed_on = ["dips.core.net.grpc_calls", "dips.worker.control"]
    found = [
        ".".join(("dips", *path.relative_to(SOURCE).with_suffix("").parts))
        for path in modules()
        if re.search(r"\bRefused\(RefusalCode\.", path.read_text()) and path.relative_to(SOURCE).parts[0] != "lab"
    ]
    assert {"dips.core.layout", "dips.local.supervisor", "dips.master.access", "dips.slave.ring"} <= set(found)
    assert [name for name in found if not refuses(name)] == passed_on
