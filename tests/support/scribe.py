"""Transcripts of protocol runs: every event that reaches the master's state and every effect that leaves it, as text.

Hashes of records and texts of layouts are left out, so that a transcript changes only when the protocol does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from support.master_bench import Bench

from dips.core.ids import Incarnation, PushId, RoundId, Version
from dips.core.layout import Layout
from dips.core.messages import Caller, Hello, PlacementSpec, Settings, SlaveBeat, SnapshotInfo, StatusReply
from dips.master.state import effects as out
from dips.master.state import events
from dips.master.state.effects import Effect

LEFT_OUT = {
    "layout", "layout_hash", "placement", "placement_hash", "hello", "settings", "commit_hash", "commit_record",
    "record", "block_order", "data_endpoint", "memory_bytes", "caller", "data_plan", "chunk_bytes", "blocks", "run_id",
}  # fmt: skip
QUIET = (SlaveBeat, StatusReply)


class Scribe(Bench):
    """A bench that writes down what it sees."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.lines: list[str] = []
        self._numbers: dict[int, int] = {}
        self._entries: dict[int, str] = {}
        super().__init__(*args, **kwargs)

    def say(self, sentence: str) -> None:
        """What the scenario does next, in words."""
        self.lines += ["", f"# {sentence}"]

    def verdict_is_out(self, cluster: str) -> bool:
        """Whether its last push is decided."""
        member = self.state.world.members.get(cluster)
        return member is None or member.push is None

    def text(self) -> str:
        return "\n".join(self.lines).strip() + "\n"

    def start_master(self) -> None:
        self.lines.append(f"master starts: epoch {self.epoch + 1}")
        super().start_master()
        handle = self.state.handle

        def written(event: events.Event, now_s: float) -> list[Effect]:
            effects = handle(event, now_s)
            self._write(event, effects)
            return effects

        self.state.handle = written  # type: ignore[method-assign]

    def _write(self, event: events.Event, effects: Sequence[Effect]) -> None:
        head = self._event(event)
        lines = _together([line for effect in effects if (line := self._effect(effect))])
        if head or lines:
            self.lines += [head or "time passes", *(f"    {line}" for line in lines)]

    def _call(self, token: int) -> int:
        """Calls are numbered as they are shown: those that are left out take no number."""
        return self._numbers.setdefault(token, len(self._numbers) + 1)

    def _event(self, event: events.Event) -> str:
        match event:
            case events.ClusterCall(token, request):
                name = type(request).__name__.removesuffix("Request")
                if name == "Heartbeat":
                    return ""
                return f"{request.caller.name} > {name}({_fields(request)}) [{self._call(token)}]"
            case events.OperatorCall(_, action):
                return f"operator > {type(action).__name__}" if "Status" not in type(action).__name__ else ""
            case events.SlaveSaid(_, message):
                quiet = isinstance(message.body, QUIET)
                return "" if quiet else f"{message.caller.name} > {_brief(message.body)}"
            case events.JournalWritten(entry_id):
                return f"durable: {self._entries[entry_id]}"
            case events.SlaveLinkDown(link):
                return f"the stream of {self.by_link[link].name} breaks"
            case _:
                return ""

    def _effect(self, effect: Effect) -> str:
        match effect:
            case out.Reply(token, body):
                quiet = isinstance(body, QUIET) or (type(body).__name__ == "HeartbeatReply" and not _stops(body))
                return "" if quiet else f"[{self._call(token)}] < {_brief(body)}"
            case out.Refuse(token, refusal):
                return f"[{self._call(token)}] < refused {refusal.code.name}: {refusal.sentence}"
            case out.ToSlave(link, command):
                return f"{self.by_link[link].name if link in self.by_link else link} < {_brief(command.body)}"
            case out.CloseLink(link, refusal):
                slave = self.by_link[link].name if link in self.by_link else link
                return f"{slave} < stream closed, {refusal.code.name}: {refusal.sentence}"
            case out.WriteJournal(entry_id, kind, record, _):
                self._entries[entry_id] = kind
                return f"journal {kind} {_journal(json.loads(record))}".rstrip()
            case out.Halt(code, sentence):
                return f"HALT {code}: {sentence}"
            case out.BeginAgain(at_least):
                return f"BEGIN AGAIN at epoch {at_least} or later"
            case out.Record("round", _, told):
                return f"round {told['round']}: {told['input']} -> {told['phase']}"
            case out.Record("publish" | "alarm" | "rolled_back" | "adopted" | "recovery" as kind, _, told):
                return f"tape {kind} {', '.join(f'{k}={_value(v)}' for k, v in told.items())}"
            case _:
                return ""


def _together(lines: list[str]) -> list[str]:
    """One line for what all slaves are told one after the other."""
    merged: list[str] = []
    for line in lines:
        names, arrow, words = line.partition(" < ")
        before, _, same = merged[-1].partition(" < ") if merged else ("", "", "")
        if arrow and words == same and "[" not in names:
            merged[-1] = f"{before}, {names} < {words}"
        else:
            merged.append(line)
    return merged


def _stops(body: Any) -> bool:
    return bool(body.stop or body.donate)


def _journal(record: dict[str, Any]) -> str:
    words = []
    for item in record.get("participants", ()):
        cluster, epoch, n, seq = item["push"]
        words.append(f"{cluster}/{epoch}.{n}#{seq} {item['verdict']}")
    for key in ("cluster", "version", "from_version", "origin", "donor", "tokens", "lost_tokens", "reason"):
        if record.get(key) not in (None, ""):
            value = record[key]
            words.append(f"{key}={':'.join(map(str, value)) if isinstance(value, list) else value}")
    return ", ".join(words)


def _brief(body: Any) -> str:
    told = _fields(body)
    return type(body).__name__ + (f"({told})" if told else "")


def _fields(body: Any) -> str:
    told = []
    for field in fields(body):
        value = getattr(body, field.name)
        if field.name in LEFT_OUT or value != value or value == field.default or value in (None, (), b"", 0, ""):
            continue
        told.append(f"{field.name}={_value(value)}")
    return ", ".join(told)


def _value(value: Any) -> str:
    match value:
        case Enum():
            return value.name
        case PushId() | Version() | RoundId() | Incarnation():
            return str(value)
        case bytes():
            return value.hex() if len(value) <= 4 else f"<{_ascii(value)}>"
        case float():
            return f"{value:g}"
        case tuple() | list():
            return "[" + ", ".join(_value(item) for item in value) + "]"
        case SnapshotInfo():
            return f"{value.version}{'' if value.committed else ' (shadow)'}"
        case Layout() | Caller() | Hello() | PlacementSpec() | Settings():
            return type(value).__name__
        case _ if is_dataclass(value):
            return _brief(value)
        case _:
            return str(value)


def _ascii(value: bytes) -> str:
    return value.decode() if value.isascii() else value[:4].hex()
