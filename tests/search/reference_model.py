"""The reference model of a search: what it remembers of the past in addition to the machines, and its invariants.

Kept as small as the invariants allow, because everything here makes states different: the decisions, the verdicts that
clusters received, the content of each version. It must never be read by a machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dips.core.ids import Incarnation, PushId, RoundId, Version
from dips.core.messages import JoinReply, JoinRequest, Verdict, VerdictKind
from dips.master.state.records import RecoveryPhase
from search.bounds import Bounds
from search.copying import Out
from search.slave_part import PieceNames, SlavePart, is_bad
from search.state import SearchViolation

K = TypeVar("K")
V = TypeVar("V")
Table = frozenset[tuple[K, V]]
"""A dictionary that can be hashed."""

COUNTED = ("APPLIED", "EXCLUDED")

OLDER = "the older master"
"""The name of a master that was taken over from, or overtaken."""

DECISIONS = ("COMMIT", "VOID", "ROLLBACK", "ADOPT", "RESHARD")


@dataclass(frozen=True)
class DurableCommit:
    """The newest durable COMMIT."""

    version: Version
    round: RoundId
    digests: tuple[tuple[str, bytes], ...]

    def holders(self, slaves: Sequence[SlavePart]) -> list[SlavePart]:
        """The slaves that together hold it."""
        names = dict(self.digests)
        return [slave for slave in slaves if slave.name in names]


@dataclass(frozen=True)
class ReferenceModel:
    """The past of one state."""

    epoch: int = 0
    decided: Table[str, str] = frozenset()  # push -> verdict of a durable record
    reported: Table[str, str] = frozenset()  # push -> verdict that its cluster received
    payload: Table[str, PieceNames] = frozenset()  # push -> work that was sent
    # version -> (round, content) of the first slave that committed it
    made: Table[Version, tuple[RoundId, PieceNames]] = frozenset()
    published: Version | None = None
    commit: DurableCommit | None = None
    fences: Table[str, int] = frozenset()  # cluster -> pushes that were counted
    incarnations: Table[str, Incarnation] = frozenset()  # cluster -> its newest one
    tokens: int = 0  # up to the newest version
    # leased data (pass, token) that the current version was trained on
    trained: frozenset[tuple[int, int]] = frozenset()
    lost: bool = False  # a disk was
    halted: bool = False
    # what the journal of a take-over begins with, until all slaves have promised its epoch; from then on what the older
    # master decides is nothing
    fork: ReferenceModel | None = None
    left: bool = False

    # ---- facts ----

    def disk_lost(self) -> ReferenceModel:
        return replace(self, lost=True)

    def forked(self) -> ReferenceModel:
        """A standby takes over with all that the journal has now."""
        return replace(self, fork=self)

    def _in_office(self) -> ReferenceModel:
        """The newer journal is the run's."""
        assert self.fork is not None
        fork = self.fork
        return replace(
            self, commit=fork.commit, tokens=fork.tokens, fences=fork.fences, decided=fork.decided,
            trained=fork.trained, fork=None, left=True,
        )  # fmt: skip

    def _is_adopted(self, out: Out) -> bool:
        """Whether this is a record that takes the newest version from the slaves."""
        if out[0] != "journal" or out[1]["kind"] != "ADOPT" or self.commit is None:
            return False
        return (Version(*out[1]["version"]), RoundId(*out[1]["round"])) == (self.commit.version, self.commit.round)

    def received(self, role: str, name: str, out: Out, look: Any) -> ReferenceModel:
        """The model after one more fact. Raises Violation."""
        if self.fork is not None and name == "master" and _holds_the_run(out):
            if self._is_adopted(out):
                return replace(self, fork=None, left=True)  # all that the older master had decided holds
            return self._in_office().received(role, name, out, look)
        if self.left and name == OLDER and out[0] == "journal":
            return self
        match out[0], out[1]:
            case "journal", {"kind": "COMMIT"}:
                return self._committed(out[1], out[2], look)
            case "journal", {"kind": "ROLLBACK" | "ADOPT"}:
                return self._taken_over(out[1], out[2])
            case "journal", {"kind": "RESHARD"}:
                return self._resharded(out[1], out[2], look)
            case "journal", {"kind": "VOID"}:
                return self._decide(out[1])
            case "told", _:
                return self._told(out[1], out[2])
            case "halt", _:
                return replace(self, halted=True)
            case "fact", "epoch" if role == "master":
                return replace(self, epoch=out[3]["epoch"])
            case "fact", "publish":
                return self._published(out[3], look)
            case "fact", "join":
                return replace(
                    self, incarnations=_put(self.incarnations, out[3]["cluster"], _incarnation(out[3]["incarnation"]))
                )
            case "fact", "_sent":
                return self._sent(out[3])
            case "fact", "committed" | "configured" | "persisted" if role == "slave":
                return self._made_on(name, look)
            case "fact", "_content":
                return self._pulled(out[3])
            case _:
                return self

    def _sent(self, fields: Mapping[str, Any]) -> ReferenceModel:
        push, payload = fields["push"], fields["payload"]
        before = dict(self.payload).get(push)
        if before is not None and before != payload:
            raise SearchViolation("I9", f"push {push} was sent as {before}, now as {payload}: its bytes changed")
        return replace(self, payload=_put(self.payload, push, payload))

    def _committed(self, record: Mapping[str, Any], snapshot: Mapping[str, Any], look: Any) -> ReferenceModel:
        version, round_id = Version(*record["version"]), RoundId(*record["round"])
        digests = tuple(sorted((slave, bytes.fromhex(digest)) for slave, digest in record["digests"].items()))
        accepted = [item for item in record["participants"] if item["verdict"] == "APPLIED"]
        commit = DurableCommit(version, round_id, digests)
        content = self._judge_shadows(commit, accepted, look.slaves)
        if twice := sorted({work for work in content if content.count(work) > 1}):
            raise SearchViolation("I6", f"{version} counts {', '.join(twice)} twice: {content}")
        self._judge_tokens(snapshot, accepted)
        self._judge_bases(record, version, look.bounds)
        _judge_leases(accepted, snapshot)
        reference = self._decide(record)
        trained = self._judge_trained(accepted)
        return replace(reference, commit=commit, tokens=int(snapshot["tokens"]), trained=trained)

    def _judge_trained(self, accepted: Sequence[Mapping[str, Any]]) -> frozenset[tuple[int, int]]:
        """I6: a data range is applied at most once in a history."""
        trained = set(self.trained)
        for item in accepted:
            for _, pass_index, chunk, _, _ in item["ranges"]:
                if (pass_index, chunk) in trained:
                    raise SearchViolation(
                        "I6", f"token {chunk} of pass {pass_index} is applied again by push {_push(item)}"
                    )
                trained.add((pass_index, chunk))
        return frozenset(trained)

    def _resharded(self, record: Mapping[str, Any], snapshot: Mapping[str, Any], look: Any) -> ReferenceModel:
        """A RESHARD: the same content as another version on other slaves, each of which holds its share durably."""
        version, round_id = Version(*record["version"]), RoundId(*record["round"])
        digests = tuple(sorted((slave, bytes.fromhex(digest)) for slave, digest in record["digests"].items()))
        commit = DurableCommit(version, round_id, digests)
        content = self._judge_shadows(commit, (), look.slaves)
        if self.commit is not None and version != self.commit.version.next():
            raise SearchViolation("I2", f"a RESHARD makes {version} out of {self.commit.version}")
        self._judge_tokens(snapshot, ())
        made = _put(self.made, version, (round_id, content))
        return replace(self, commit=commit, made=made)

    def _taken_over(self, record: Mapping[str, Any], snapshot: Mapping[str, Any]) -> ReferenceModel:
        """A ROLLBACK or ADOPT: another history continues; decisions of the one before no longer count."""
        version, round_id = Version(*record["version"]), RoundId(*record["round"])
        digests = tuple(sorted((slave, bytes.fromhex(digest)) for slave, digest in record["digests"].items()))
        fences = frozenset((name, int(entry["fence"])) for name, entry in snapshot["clusters"].items())
        before = dict(self.fences)
        if any(fence < before.get(name, 0) for name, fence in fences) and record["kind"] == "ROLLBACK":
            raise SearchViolation("I8", f"a ROLLBACK lowers fences from {sorted(before.items())} to {sorted(fences)}")
        commit, tokens = DurableCommit(version, round_id, digests), int(snapshot["tokens"])
        taken = frozenset((_push({"push": push}), "ROLLED_BACK") for push in record.get("rolled_back", ()))
        held = _still_settled(self.trained, snapshot)
        return replace(
            self, commit=commit, tokens=tokens, fences=fences, decided=taken, reported=frozenset(), trained=held
        )

    def _judge_tokens(self, snapshot: Mapping[str, Any], accepted: Sequence[Mapping[str, Any]]) -> None:
        added = sum(item["tokens"] for item in accepted)
        if snapshot["tokens"] != self.tokens + added:
            raise SearchViolation(
                "I11", f"{self.tokens} tokens and {added} more make {snapshot['tokens']} in the ledger"
            )
        for item in accepted:
            made = dict(self.payload)[_push(item)]
            if item["base"] is not None and item["tokens"] != len(made):  # each step is one token
                raise SearchViolation(
                    "I11", f"push {_push(item)} counts {item['tokens']} tokens, and was made of {made}"
                )

    def _judge_bases(self, record: Mapping[str, Any], version: Version, bounds: Bounds) -> None:
        for item in record["participants"]:
            if item["base"] is None:
                continue
            base = Version(*item["base"])
            behind = version.v - 1 - base.v
            most = bounds.s_max or max(8, 4 * bounds.clusters)
            if base.timeline == version.timeline and behind > most:
                raise SearchViolation(
                    "I10", f"push {_push(item)} is based on {base}, {behind} versions old, at most {most} may be"
                )

    def _decide(self, record: Mapping[str, Any]) -> ReferenceModel:
        decided, reported, fences = dict(self.decided), dict(self.reported), dict(self.fences)
        for item in record["participants"]:
            push = _push(item)
            cluster = item["push"][0]
            if push in decided:
                raise SearchViolation("I6", f"push {push} is {item['verdict']}, and was {decided[push]} before")
            if reported.get(push) == "ABORTED":
                raise SearchViolation("I6", f"push {push} is {item['verdict']}, and its cluster received ABORTED")
            if item["base"] is not None and item["fence"] != fences.get(cluster, 0):
                raise SearchViolation(
                    "I8",
                    f"push {push} carries fence {item['fence']}, the fence of {cluster} is {fences.get(cluster, 0)}",
                )
            decided[push] = item["verdict"]
            fences[cluster] = fences.get(cluster, 0) + 1
        return replace(self, decided=frozenset(decided.items()), fences=frozenset(fences.items()))

    def _judge_shadows(
        self, commit: DurableCommit, accepted: Sequence[Mapping[str, Any]], slaves: list[SlavePart]
    ) -> PieceNames:
        """I9 and I5: every slave holds, durably, the base and all of every accepted push."""
        payload, made = dict(self.payload), dict(self.made)
        before: PieceNames = ()
        if self.commit is not None and (not accepted or accepted[0]["base"] is not None):
            before = made[self.commit.version][1] if self.commit.version in made else ()
        wanted = (*before, *(work for item in accepted for work in payload[_push(item)]))
        for slave in commit.holders(slaves):
            file = slave.disk.get((commit.version, commit.round))
            if file is None:
                if not self.lost:
                    raise SearchViolation(
                        "I5", f"COMMIT of {commit.version} is durable, slave {slave.name} has no shadow of it"
                    )
                continue
            if file.content != wanted:
                raise SearchViolation(
                    "I9", f"{commit.version} on slave {slave.name} is made of {file.content}, not of {wanted}"
                )
        return wanted

    def _made_on(self, name: str, look: Any) -> ReferenceModel:
        """A slave committed: the content of a version is the same on all slaves and never changes."""
        slave = next(part for part in look.slaves if part.name == name)
        made = dict(self.made)
        for (version, round_id), file in slave.disk.items():
            if not file.info.committed:
                continue
            known = made.setdefault(version, (round_id, file.content))
            if known[1] != file.content:
                raise SearchViolation("I2", f"{version} is {known[1]}, on slave {name} it is {file.content}")
            if known[0] != round_id:
                raise SearchViolation("I1", f"{version} is of round {known[0]}, on slave {name} of round {round_id}")
        return replace(self, made=frozenset(made.items()))

    def _published(self, fields: Mapping[str, Any], look: Any) -> ReferenceModel:
        version = _version(fields["version"])
        at = self.commit is not None and self.commit.version == version
        for slave in self.commit.holders(look.slaves) if self.commit is not None and at else look.slaves:
            held = [file for key, file in slave.disk.items() if key[0] == version and file.info.committed]
            if not held and not self.lost:
                raise SearchViolation("I4", f"{version} is published, slave {slave.name} has not committed it durably")
            if any(is_bad(file.content) for file in held):
                raise SearchViolation("I13", f"{version} is published with elements that are not finite")
        rounds = {key[1] for s in look.slaves for key, f in s.disk.items() if key[0] == version and f.info.committed}
        if len(rounds) > 1:
            raise SearchViolation("I1", f"{version} is published out of rounds {', '.join(map(str, sorted(rounds)))}")
        self._judge_history(version)
        return replace(self, published=version)

    def _judge_history(self, version: Version) -> None:
        """I7: the content of a version is in every later one of its timeline."""
        made = dict(self.made)
        for older, (_, content) in made.items():
            newer = made.get(version, (None, ()))[1]
            if older.timeline == version.timeline and older < version and newer[: len(content)] != content:
                raise SearchViolation("I7", f"{version} is made of {newer}, which does not continue {older}: {content}")

    def _pulled(self, fields: Mapping[str, Any]) -> ReferenceModel:
        read = fields["read"]
        if len({content for _, content in read}) > 1 or len({round_id for round_id, _ in read}) > 1:
            raise SearchViolation("I3", f"what {fields['by']} pulled as {fields['version']} is torn: {read}")
        version, content = _version(fields["version"]), read[0][1]
        for push, kind in self.decided:
            if kind == "APPLIED" and dict(self.reported).get(push) == "APPLIED" and push.startswith(f"{fields['by']}/"):
                missing = set(dict(self.payload)[push]) - set(content)
                if missing and not self.lost:
                    raise SearchViolation(
                        "I7", f"{fields['by']} received that {push} is in, and pulls {version} without it"
                    )
        return self

    # ---- answers ----

    def _told(self, request: Any, body: Any) -> ReferenceModel:
        if isinstance(body, JoinReply):
            # A durable COMMIT may be reported before it is published: the pull waits for that.
            verdict = body.last_push
        else:
            verdict = getattr(body, "answer", None)
            self._judge_published(verdict)
        return self._verdict(verdict) if isinstance(verdict, Verdict) else self

    def is_past(self, request: Any, epoch: int) -> bool:
        """Whether a call is of an older incarnation of its cluster, or names another epoch than that of the master that
        takes it. A master whose own epoch is past may know only an older incarnation.
        """
        caller = request.caller
        if isinstance(request, JoinRequest) or getattr(request, "reader", False):
            return False
        if epoch != self.epoch:
            return bool(caller.epoch != epoch)
        newest = dict(self.incarnations).get(caller.name)
        return bool(caller.epoch != self.epoch or caller.incarnation != newest)

    def _judge_published(self, verdict: Any) -> None:
        if not isinstance(verdict, Verdict) or verdict.kind is not VerdictKind.APPLIED or self.lost:
            return  # after a lost disk APPLIED may be reported for a version that is about to be rolled back
        if self.published is None or verdict.version is None or verdict.version > self.published:
            raise SearchViolation(
                "I4", f"{verdict.push} is reported APPLIED({verdict.version}), published is {self.published}"
            )

    def _verdict(self, verdict: Verdict) -> ReferenceModel:
        push, kind = str(verdict.push), verdict.kind.name
        decided = dict(self.decided).get(push)
        reported = dict(self.reported).get(push)
        if verdict.kind is VerdictKind.ROLLED_BACK:
            return replace(self, reported=_put(self.reported, push, kind))
        if reported is not None and reported != kind:
            raise SearchViolation("I6", f"push {push} is reported {kind}, and was reported {reported} before")
        if kind == "APPLIED" and decided == "ROLLED_BACK":
            raise SearchViolation(
                "I7", f"push {push} is reported APPLIED, but no version of this timeline contains it any longer"
            )
        if kind in COUNTED and decided != kind and not self.lost:
            raise SearchViolation("I6", f"push {push} is reported {kind}, but no durable record says so ({decided})")
        if kind == "ABORTED" and decided in COUNTED:
            raise SearchViolation("I6", f"push {push} is reported ABORTED, but is {decided}")
        return replace(self, reported=_put(self.reported, push, kind))

    # ---- states ----

    def check(self, slaves: Sequence[SlavePart], bounds: Bounds) -> None:
        """I5 in every state: the newest COMMIT can be completed on every slave."""
        if self.commit is None or self.lost:
            return
        for slave in self.commit.holders(slaves):
            file = slave.disk.get((self.commit.version, self.commit.round))
            if file is None or slave.digest(file) != dict(self.commit.digests)[slave.name]:
                raise SearchViolation(
                    "I5", f"COMMIT of {self.commit.version} is durable, slave {slave.name} can no longer complete it"
                )


def _holds_the_run(out: Out) -> bool:
    """Whether a master that took over says so: all slaves have promised its epoch."""
    decides = out[0] == "journal" and out[1]["kind"] in DECISIONS
    return decides or (out[0] == "fact" and out[1] == "recovery" and out[3]["phase"] == RecoveryPhase.NONE.value)


class ReferenceModels:
    """Reference models by number."""

    def __init__(self) -> None:
        self._ids: dict[ReferenceModel, int] = {}
        self._all: list[ReferenceModel] = []

    def __getitem__(self, number: int) -> ReferenceModel:
        return self._all[number]

    def number(self, reference: ReferenceModel) -> int:
        found = self._ids.get(reference)
        if found is None:
            found = self._ids[reference] = len(self._all)
            self._all.append(reference)
        return found


def _judge_leases(accepted: Sequence[Mapping[str, Any]], snapshot: Mapping[str, Any]) -> None:
    """I12: applied data is settled, in no other state, and counted. Every chunk is one token here."""
    if not snapshot["leases"]:
        return
    unsettled = _unsettled(snapshot)
    for item in accepted:
        for _, pass_index, chunk, _, _ in item["ranges"]:
            if (found := unsettled.get((pass_index, chunk))) is not None:
                raise SearchViolation("I12", f"token {chunk} of push {_push(item)} is {found} after its COMMIT")
    if (applied := snapshot["leases"]["settled"]["applied"]) != snapshot["tokens"]:
        raise SearchViolation("I12", f"{applied} tokens are counted as applied, the run has {snapshot['tokens']}")


def _unsettled(snapshot: Mapping[str, Any]) -> dict[tuple[int, int], str]:
    """The state of each (pass, token) that is free or leased. A pass without rows is over: all of it is settled."""
    states: dict[tuple[int, int], str] = {}
    for pass_index, begin, end, state, _, _ in snapshot["leases"]["holdings"]:
        for token in range(begin, end):
            if (pass_index, token) in states:
                raise SearchViolation("I12", f"token {token} of pass {pass_index} is in two states at once")
            states[pass_index, token] = state
    return {token: state for token, state in states.items() if state != "settled"}


def _still_settled(trained: frozenset[tuple[int, int]], snapshot: Mapping[str, Any]) -> frozenset[tuple[int, int]]:
    """Those of `trained` that are settled in an older table of the same history, so they were applied then already."""
    if not snapshot["leases"]:
        return frozenset()
    unsettled, n_begun = _unsettled(snapshot), snapshot["leases"]["begun"]
    return frozenset(token for token in trained if token[0] < n_begun and token not in unsettled)


def _put(table: Table[K, V], key: K, value: V) -> Table[K, V]:
    return frozenset((dict(table) | {key: value}).items())


def _push(item: Mapping[str, Any]) -> str:
    cluster, epoch, n, seq = item["push"]
    return str(PushId(cluster, Incarnation(epoch, n), seq))


def _version(text: str) -> Version:
    timeline, v = text.split(":")
    return Version(int(timeline), int(v))


def _incarnation(text: str) -> Incarnation:
    epoch, n = text.split(".")
    return Incarnation(int(epoch), int(n))
