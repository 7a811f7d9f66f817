"""A master in a process of its own, with a state that journals every Leave before it answers.

A Leave whose reason is "begin again at N" begins an epoch that is at least N instead.

Run as `python -m support.master_process DIRECTORY [KNOB=VALUE ...]`; errors end it as they end the real one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import sys
from collections.abc import Sequence

from dips.core.config import load
from dips.core.errors import DipsError
from dips.core.failpoints import install
from dips.core.messages import LeaveReply, LeaveRequest
from dips.core.telemetry import configure_logging
from dips.master.config import MasterConfig
from dips.master.process import serve
from dips.master.state.effects import BeginAgain, Effect, Reply, WriteJournal
from dips.master.state.events import ClusterCall, Event, JournalWritten
from dips.master.state.run_config import RunConfig

AGAIN = "begin again at "


class LeaveCounter:
    """The reasons of all Leaves are its whole state; each is durable before its caller hears of it."""

    def __init__(self, config: RunConfig, epoch: int, snapshot_json: str | None, wall_offset_s: float) -> None:
        self._reasons: list[str] = json.loads(snapshot_json or "[]")
        self._entry_ids = itertools.count(1)
        self._token_of_entry: dict[int, int] = {}

    def start(self, now_s: float) -> Sequence[Effect]:
        return ()

    def next_deadline_s(self) -> float | None:
        return None

    def run_is_over(self) -> bool:
        return False

    def handle(self, event: Event, now_s: float) -> Sequence[Effect]:
        match event:
            case ClusterCall(_, LeaveRequest(_, reason)) if reason.startswith(AGAIN):
                return [BeginAgain(int(reason.removeprefix(AGAIN)), reason)]
            case ClusterCall(token, LeaveRequest(_, reason)):
                entry_id = next(self._entry_ids)
                self._token_of_entry[entry_id] = token
                self._reasons.append(reason)
                return [WriteJournal(entry_id, "LEAVE", json.dumps(reason), json.dumps(self._reasons))]
            case JournalWritten(entry_id):
                return [Reply(self._token_of_entry.pop(entry_id), LeaveReply())]
        return ()


def main(directory: str, *knobs: str) -> int:
    configure_logging("master", "demo")
    given = dict(knob.split("=", 1) for knob in knobs)
    overrides = {"run_id": "demo", "directory": directory, "insecure": True, **given}
    try:
        install("master")
        config = load(MasterConfig, "master", environment={}, overrides=overrides).value
        return asyncio.run(serve(config, LeaveCounter)).exit_code
    except DipsError as error:
        logging.critical("%s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
