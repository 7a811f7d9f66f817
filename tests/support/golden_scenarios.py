"""Transcripts of short runs of the real master among scripted peers, as they stand in tests/golden.

A transcript has every event that reaches the master's state and every effect that leaves it, as text. Hashes of records
and texts of layouts are left out, so that it changes only when the protocol does.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

from support.master_bench import LEASED, Bench

from dips.core import messages as m
from dips.core.errors import Refused
from dips.core.ids import Incarnation, PushId, RoundId, Version
from dips.core.layout import Layout
from dips.master.state import effects as out
from dips.master.state import tape

LEFT_OUT = {
    "layout", "layout_hash", "placement", "placement_hash", "hello", "settings", "commit_hash", "commit_record",
    "record", "block_order", "data_endpoint", "memory_bytes", "caller", "data_plan", "chunk_bytes", "blocks", "run_id",
}  # fmt: skip
QUIET = (m.SlaveBeat, m.StatusReply)


class Transcript(Bench):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.lines: list[str] = []
        self._numbers: dict[int, int] = {}
        self._entries: dict[int, str] = {}
        super().__init__(*args, **kwargs)

    def say(self, sentence: str) -> None:
        self.lines += ["", f"# {sentence}"]

    def verdict_is_out(self, cluster: str) -> bool:
        member = self.state.shared.members.get(cluster)
        return member is None or member.push is None

    def text(self) -> str:
        return "\n".join(self.lines).strip() + "\n"

    def start_master(self) -> None:
        self.lines.append(f"master starts: epoch {self.epoch + 1}")
        super().start_master()
        handle = self.state.handle

        def written(event: out.Event, now_s: float) -> list[out.Effect]:
            effects = handle(event, now_s)
            self._write(event, effects)
            return effects

        self.state.handle = written  # type: ignore[method-assign]

    def _write(self, event: out.Event, effects: Sequence[out.Effect]) -> None:
        head = self._event(event)
        lines = _together([line for effect in effects if (line := self._effect(effect))])
        if head or lines:
            self.lines += [head or "time passes", *(f"    {line}" for line in lines)]

    def _call(self, token: int) -> int:
        """Calls are numbered as they are shown: those that are left out take no number."""
        return self._numbers.setdefault(token, len(self._numbers) + 1)

    def _event(self, event: out.Event) -> str:
        match event:
            case out.ClusterCall(token, request):
                name = type(request).__name__.removesuffix("Request")
                if name == "Heartbeat":
                    return ""
                return f"{request.caller.name} > {name}({_fields(request)}) [{self._call(token)}]"
            case out.OperatorCall(_, action):
                return f"operator > {type(action).__name__}" if "Status" not in type(action).__name__ else ""
            case out.SlaveSaid(_, message):
                quiet = isinstance(message.body, QUIET)
                return "" if quiet else f"{message.caller.name} > {_brief(message.body)}"
            case out.JournalWritten(entry_id):
                return f"durable: {self._entries[entry_id]}"
            case out.SlaveLinkDown(link):
                return f"the stream of {self.by_link[link].name} breaks"
            case _:
                return ""

    def _effect(self, effect: out.Effect) -> str:
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
            case tape.RoundMoved():
                return f"round {effect.round}: {effect.input} -> {effect.phase}"
            case tape.AlarmRaised(sentence=sentence):
                return f"tape alarm sentence={_value(sentence)}"
            case tape.RoundTooSmall(sentence=sentence):
                return f"tape {effect.kind} {sentence}"
            case tape.VersionPublished() | tape.RolledBack() | tape.HistoryAdopted() | tape.RecoveryMoved():
                return f"tape {effect.kind} {', '.join(f'{k}={_value(v)}' for k, v in effect.fields.items())}"
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
        case m.SnapshotInfo():
            return f"{value.version}{'' if value.committed else ' (shadow)'}"
        case Layout() | m.Caller() | m.Hello() | m.PlacementSpec() | m.Settings():
            return type(value).__name__
        case _ if is_dataclass(value):
            return _brief(value)
        case _:
            return str(value)


def _ascii(value: bytes) -> str:
    return value.decode() if value.isascii() else value[:4].hex()


Scenario = Callable[[], Transcript]

V0, V1, V2 = (Version(1, v) for v in range(3))
SCENARIOS: dict[str, Scenario] = {}


def standing(*names: str, **config: object) -> Transcript:
    """The seed is published and pulled; its transcript is that of `seed` and left out."""
    bench = Transcript(**config)
    bench.running(*names)
    for name in names:
        bench.beat(name)
    bench.lines.clear()
    return bench


def scenario(*names: str, **config: Any) -> Callable[[Callable[[Transcript], None]], None]:
    """Of a standing run of these clusters, or where there are none of one that no cluster has joined yet."""

    def keep(play: Callable[[Transcript], None]) -> None:
        def played() -> Transcript:
            bench = standing(*names, **config) if names else Transcript(**config)
            play(bench)
            return bench

        SCENARIOS[play.__name__] = played

    return keep


def refused(call: Callable[[], object]) -> None:
    with contextlib.suppress(Refused):
        call()


@scenario()
def seed(bench: Transcript) -> None:
    bench.say("two slaves attach; the first cluster seeds the run, the second pulls")
    bench.running("a", "b")


@scenario("a", "b")
def round_of_two(bench: Transcript) -> None:
    bench.say("both clusters push; the window closes when both are in")
    bench.pushes("a", "b")
    for name in ("a", "b"):
        bench.verdict(name)
        bench.pull(name)


@scenario("a", "b", "c")
def late_push_joins_the_next_window(bench: Transcript) -> None:
    bench.slaves[0].hold.add(m.Prepare)
    bench.say("a and b push, c does not; the grace ends; c's push comes while the round is prepared")
    bench.pushes("a", "b")
    bench.advance(2.0)
    bench.push("c")
    bench.say("the round commits; the window of c's push opens at once")
    bench.slaves[0].release(m.Prepare)
    bench.advance(2.0)


@scenario("a", "b", "c", min_clusters_per_round=3, round_deadline_s=20.0)
def round_with_too_few_pushes(bench: Transcript) -> None:
    bench.say("a and b push, c does not; the grace ends, the round waits; at its deadline it goes on with two pushes")
    bench.pushes("a", "b")
    bench.advance(20.0)


@scenario("a", "b")
def excluded_push(bench: Transcript) -> None:
    bench.nonfinite["b"] = 3
    bench.say("b's push is not finite: it is excluded, a's is merged")
    bench.pushes("a", "b")
    bench.verdict("b")


@scenario("a")
def void_round(bench: Transcript) -> None:
    bench.nonfinite["a"] = 1
    bench.say("the only push is excluded: no version changes, the fence does")
    bench.push("a")
    bench.verdict("a")
    bench.say("so the same base is stale")
    bench.begin_push("a")


@scenario("a")
def abort_by_slave_loss(bench: Transcript) -> None:
    bench.slaves[1].hold.add(m.Prepare)
    bench.push("a")
    bench.say("a slave dies in PREPARE: the round is aborted, and so is the push, which lost its staging")
    bench.slaves[1].die()
    bench.verdict("a")
    bench.slaves[1].hold.clear()
    bench.slaves[1].attach()
    bench.say("pushed again under a new number")
    bench.push("a")
    bench.advance(3.0)


@scenario("a")
def commit_driven_forward_after_restart(bench: Transcript) -> None:
    bench.all_hold(m.Commit)
    bench.push("a")
    bench.say("the COMMIT is journaled, no slave has flipped, the master dies")
    bench.all_hold()
    bench.restart()
    bench.say("a joins again and is told")
    bench.join("a", previous=bench.clusters["a"].join.incarnation)


@scenario("a", "b")
def stale_fence(bench: Transcript) -> None:
    bench.push("a")
    bench.advance(3.0)
    bench.say("a pushes again from the same base, although its push was counted")
    bench.begin_push("a")


@scenario("a", "b")
def undecided(bench: Transcript) -> None:
    bench.push("a")
    bench.say("a begins another push while one is undecided")
    bench.begin_push("a")


@scenario("a", plan=LEASED)
def rejoin_keeps_work(bench: Transcript) -> None:
    ranges = bench.lease("a", 100)
    bench.begin_push("a", 100, ranges)
    bench.say("a is evicted in mid-transfer; the push is aborted, the lease is kept")
    bench.operate(m.EvictRequest("", "a", "as a test"))
    bench.say("it joins again with what it holds and pushes it from the same base")
    base, fence = bench.clusters["a"].base, bench.clusters["a"].fence
    bench.join("a", previous=bench.clusters["a"].join.incarnation, held=ranges)
    bench.clusters["a"].base, bench.clusters["a"].fence = base, fence
    bench.push("a", 100, ranges)


@scenario("a")
def rollback(bench: Transcript) -> None:
    bench.push("a")
    bench.pull("a")
    bench.say("a slave's disk comes back without the newest version: the run goes back by one")
    bench.slaves[0].come_back_without(V1)
    bench.say("what a pushes on the lost version is stale")
    bench.begin_push("a")


@scenario("a")
def donation(bench: Transcript) -> None:
    bench.say("a slave's disk comes back empty: no version is left on all; a is asked for its copy")
    bench.slaves[0].come_back_without()
    bench.beat("a")
    bench.donate("a", V0)


@scenario("a")
def adopt(bench: Transcript) -> None:
    old = bench.snapshot
    bench.push("a")
    bench.say("the master comes back with an older journal than the slaves' newest commit")
    bench.restart(old)


@scenario("a")
def rebuild(bench: Transcript) -> None:
    bench.push("a")
    bench.config = replace(bench.config, rebuild=True)
    bench.say("the master comes back with no journal, told to rebuild; the epoch was used before")
    for slave in bench.slaves:
        slave.alive = False
    bench.snapshot, bench.epoch = None, 0
    bench.start_master()
    with contextlib.suppress(Refused):
        bench.slaves[0].attach()
    bench.say("the process begins again with a newer epoch")
    assert bench.began_again is not None
    bench.epoch = bench.began_again.at_least - 1
    bench.restart()


@scenario("a", "b")
def eviction(bench: Transcript) -> None:
    bench.push("a")
    bench.say("b falls silent: after five beats it is evicted, and the window waits no longer for it")
    bench.silent.add("b")
    bench.advance(12.0)


@scenario("a", plan=LEASED)
def lease_and_return(bench: Transcript) -> None:
    ranges = bench.lease("a", 200)
    bench.say("a gives back one of two ranges, and may not push it any more")
    bench.ask(m.ReturnDataRequest(bench.caller("a"), ranges[1:]))
    refused(lambda: bench.begin_push("a", 200, ranges))
    bench.push("a", 100, ranges[:1])


@scenario("a", "b")
def drain(bench: Transcript) -> None:
    bench.push("a")
    bench.say("a is drained: its open push is decided, it is told to stop, pushes the steps made since, and leaves")
    bench.operate(m.DrainRequest("", "a", "maintenance"))
    bench.push("b")
    bench.pull("a")
    bench.beat("a")
    bench.push("a")
    bench.advance(1.5)
    bench.pull("a")
    bench.beat("a")
    bench.ask(m.LeaveRequest(bench.caller("a"), "drained"))


@scenario("a")
def pause_outlives_the_master(bench: Transcript) -> None:
    bench.say("paused: a push is admitted, no round begins, not even after a restart")
    bench.operate(out.Pause(m.OperatorRequest("", "the operator looks")))
    bench.push("a")
    bench.advance(3.0)
    bench.restart()
    bench.join("a", previous=bench.clusters["a"].join.incarnation)
    bench.pull("a")
    bench.push("a")
    bench.advance(3.0)
    bench.say("resumed")
    bench.operate(out.Resume(m.OperatorRequest("")))


@scenario("a")
def stop(bench: Transcript) -> None:
    bench.push("a")
    bench.say("the operator stops the run: the last version is pulled, the cluster leaves, every process ends")
    bench.operate(out.Stop(m.OperatorRequest("", "enough")))
    bench.pull("a")
    bench.beat("a")
    bench.ask(m.LeaveRequest(bench.caller("a"), "the run has ended"))
    while bench.halted is None:
        bench.advance(0.5)


@scenario("a", settings=m.Settings(durability="async"), async_lag_versions=1)
def async_lag(bench: Transcript) -> None:
    bench.say("in async mode slaves write versions later: rounds wait when a disk is too far behind")
    for _ in range(3):
        bench.push("a")
        bench.advance(2.0)
        if bench.verdict_is_out("a"):
            bench.pull("a")
    bench.say("the disks catch up, and the round begins")
    for slave in bench.slaves:
        slave.say(m.SlaveBeat(durable=V2))


@scenario("a")
def newer_epoch_halts(bench: Transcript) -> None:
    bench.say("a slave has promised a newer epoch: another master serves this run")
    bench.slaves[0].die()
    bench.slaves[0].promised = 7
    bench.slaves[0].attach()
