"""Handles slaves: ABSENT -> ATTACHED -> PROMISED -> CONFIGURING -> READY, placement of blocks, and their reports.

A slave whose stream breaks is lost at once: its stagings are in memory only, and a new stream is a new
incarnation. What it committed is on its disk.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from dips.core import messages
from dips.core.errors import ConfigError, RefusalCode, Refused
from dips.core.ids import Incarnation, SlaveId, check_name
from dips.core.layout import Layout
from dips.core.machine import Phase
from dips.core.placement import check_measured, check_rounding, place
from dips.core.protocol import PROTOCOL_MIN, RANKS, Agreement, agree
from dips.master.state import tape
from dips.master.state.effects import BeginAgain
from dips.master.state.ledger import MAX_WHOLE
from dips.master.state.pushes import Pushes
from dips.master.state.records import SLAVE_TABLE, Kept, PushPhase, RoundPhase, Slave, SlavePhase
from dips.master.state.recovery import Recovery
from dips.master.state.reshard import Reshard
from dips.master.state.rollback import LEASE_NUMBERS_OF_AN_EPOCH
from dips.master.state.rounds import Rounds
from dips.master.state.shared import SharedState
from dips.master.state.slave_links import NameClaims, SlaveLinks
from dips.master.state.status import recovery_words

NEWER_EPOCH_EXIT = 6

MAX_EPOCH = MAX_WHOLE // LEASE_NUMBERS_OF_AN_EPOCH // 2
"""The largest epoch and timeline: no run has this many starts or rollbacks, and the lease numbers of a later epoch
would not fit into a message."""

MAX_DRAWN_BYTES = 32
"""The most bytes of a random identity of a slave or cluster; every journal entry contains it."""

MAX_REASON_CHARACTERS = 400
"""The most characters of a slave's report on refused connections, which is in every beat."""

REBUILD_SLAVES = 64
"""The most slaves that a rebuild accepts, where the run has fewer: what each one holds takes memory here."""

LOST_CODES = (RefusalCode.VERSION_GONE, RefusalCode.DISK, RefusalCode.DIGEST)
"""Refusal codes of a slave that cannot load, which mean that it does not hold what its hello named."""


class SlaveRegistry:
    """Handles the messages of slaves and keeps track of which are attached."""

    def __init__(
        self,
        shared: SharedState,
        pushes: Pushes,
        rounds: Rounds,
        links: SlaveLinks,
        recovery: Recovery,
        reshard: Reshard,
    ) -> None:
        self._shared = shared
        self._pushes = pushes
        self._rounds = rounds
        self._links = links
        self._recovery = recovery
        self._reshard = reshard
        self._welcomed: set[SlaveId] = set()
        self._restarts: dict[SlaveId, int] = {}
        self._claims = NameClaims()
        for name, memory_bytes in shared.ledger.slaves.items():
            shared.slaves[name] = self._new(name, memory_bytes)
            shared.slaves[name].directory_id = shared.ledger.directories.get(name, b"")

    def start(self) -> None:
        """Reserves the names of known directories for the time of an eviction, so that their slaves can return."""
        for slave in self._shared.slaves.values():
            slave.held_until_s = self._shared.now_s + self._shared.config.evict_after_s

    def said(self, link: int, message: messages.SlaveMessage) -> None:
        """Handles a slave's message. Raises Refused for a hello that is not accepted; the caller closes the link."""
        if isinstance(message.body, messages.SlaveHello):
            self._hello(link, message, message.body)
            return
        slave = self._of_link(link)
        if (
            slave is None
            or message.caller.name != slave.id
            or message.caller.incarnation != slave.incarnation
            or message.caller.epoch != self._shared.epoch
        ):
            return  # from an incarnation that is over: it must not change the state
        slave.beat_s = self._shared.now_s
        self._dispatch(slave, message)

    def link_down(self, link: int) -> None:
        slave = self._of_link(link)
        if slave is not None:
            self._recovery.gone(slave.id)
            self._links.lose(slave, f"slave {slave.id} went away")

    def tick(self) -> None:
        shared = self._shared
        for slave in list(shared.slaves.values()):
            silent_s = shared.now_s - slave.beat_s
            if slave.link is not None and silent_s > shared.config.evict_after_s:
                sentence = f"slave {slave.id} was silent for {silent_s:.1f} s"
                shared.close(slave.link, Refused(RefusalCode.FENCED, f"{sentence}: attach again"))
                self._links.lose(slave, sentence)

    def rearm(self, gap_s: float) -> None:
        self._claims.rearm()
        for slave in self._shared.slaves.values():
            slave.beat_s = self._shared.now_s
            slave.held_until_s += gap_s

    def stop_all(self, reason: str) -> None:
        for slave in self._shared.slaves.values():
            self._shared.command(slave, messages.StopSlave(reason), "stop")

    def place_model(self, layout: Layout) -> None:
        """Places the first joiner's layout on the slaves. Raises Refused: BUSY (slaves are missing), MEMORY, CONFIG."""
        shared = self._shared
        promised = [slave for slave in shared.slaves.values() if slave.phase.now is SlavePhase.PROMISED]
        if words := recovery_words(shared):
            raise Refused(RefusalCode.BUSY, words, retry_after_s=0.5)
        if len(promised) < shared.config.n_slaves:
            raise Refused(
                RefusalCode.BUSY,
                f"waiting for slaves: {len(promised)} of {shared.config.n_slaves} have attached",
                retry_after_s=0.5,
            )
        if len(layout.blocks) < len(promised):
            raise Refused(
                RefusalCode.CONFIG,
                f"the model has {len(layout.blocks)} blocks, fewer than the {len(promised)} slaves: start fewer slaves",
            )
        memory = [(slave.id, slave.memory_bytes) for slave in promised]
        slots, pins = shared.config.max_clusters, shared.config.pinned_versions
        settings = shared.config.settings
        check_rounding(layout.blocks, settings.pull_wire)
        placement = place(layout, memory, slots, pins, settings.chunk_bytes, settings.memory_files, settings.pull_wire)
        check_measured(placement, slots, shared.config.settings.max_message_bytes)
        shared.ledger.layout, shared.ledger.placement = layout, placement
        shared.ledger.slaves = dict(memory)
        shared.ledger.directories = {slave.id: slave.directory_id for slave in promised if slave.directory_id}
        shared.journal(
            "PLACE",
            {"layout_hash": layout.layout_hash.hex(), "placement_hash": placement.placement_hash.hex()},
        )
        for slave in promised:
            self._links.configure(slave)

    # ---- attach ----

    def _hello(self, link: int, message: messages.SlaveMessage, body: messages.SlaveHello) -> None:
        shared, name = self._shared, SlaveId(message.caller.name)
        if self._of_link(link) is not None:
            raise Refused(RefusalCode.MALFORMED, f"this stream attached before, now as {name!r}: send one hello")
        agreement = self._check_hello(name, message, body)
        slave = shared.slaves.get(name)
        self._check_directory(slave, body)
        if slave is not None and slave.link is not None:
            taken = Refused(RefusalCode.FENCED, f"another process attached as slave {name}")
            shared.close(slave.link, taken)
            self._links.lose(slave, f"slave {name} attached again")
        # Looked up again: before blocks are placed, a slave that is lost is forgotten.
        slave = shared.slaves.setdefault(name, self._new(name, body.memory_bytes))
        slave.incarnations = max(slave.incarnations, self._restarts.get(name, 0)) + 1
        self._restarts[name] = slave.incarnations
        slave.link, slave.incarnation = link, Incarnation(shared.epoch, slave.incarnations)
        slave.memory_bytes, slave.endpoint, slave.snapshots = (
            body.memory_bytes,
            body.data_endpoint,
            body.snapshots,
        )
        slave.curve_key, slave.directory_id = body.curve_key, body.directory_id
        if name in shared.ledger.slaves:
            shared.ledger.directories[name] = body.directory_id
        shared.allowed.put(messages.KeyRole.SLAVE, name, body.curve_key)
        slave.beat_s, slave.trouble = shared.now_s, ""
        slave.phase.move("hello", SlavePhase.ATTACHED, shared.now_s, message.caller.cause_id)
        shared.record(
            tape.SlaveAttached(
                message.caller.cause_id, slave=name, incarnation=slave.incarnation, directory=body.directory_id
            )
        )
        hello = messages.Hello(PROTOCOL_MIN, agreement.version, tuple(sorted(agreement.capabilities)))
        slave.capabilities = agreement.capabilities
        self._welcomed.add(name)
        shared.command(slave, messages.Welcome(hello, shared.config.settings), message.caller.cause_id)
        if shared.allowed.encrypted:
            shared.command(slave, messages.Allow(shared.allowed.keys()), message.caller.cause_id)

    def _check_hello(self, name: SlaveId, message: messages.SlaveMessage, body: messages.SlaveHello) -> Agreement:
        shared = self._shared
        try:
            check_name(name, "slave id")
        except ConfigError as error:
            raise Refused(RefusalCode.MALFORMED, str(error)) from error
        shared.check_run(message.caller.run_id, f"slave {name!r}")
        _check_numbers(name, body)
        agreement = agree(body.hello.protocol_min, body.hello.protocol_max, body.hello.capabilities, f"slave {name!r}")
        together = next((member for member in shared.live() if member.pushers > 1), None)
        if together is not None and RANKS not in agreement.capabilities:
            raise Refused(
                RefusalCode.CONFIG,
                f"slave {name!r} runs a release that does not know clusters of several ranks, and cluster "
                f"{together.cluster!r} has {together.pushers}: install the same release of dips on all slaves",
            )
        if not body.data_endpoint.startswith("tcp://"):
            raise Refused(
                RefusalCode.MALFORMED,
                f"data endpoint {body.data_endpoint!r} is not of the form tcp://HOST:PORT",
            )
        shared.allowed.check(messages.KeyRole.SLAVE, name, body.curve_key)
        expected = self._expected()
        if name not in expected and self._all_places_taken(body):
            newer = (
                f"; it has promised epoch {body.promised_epoch} and this master's is {shared.epoch}: if the master's "
                "directory was put back from a copy that is older than a reshard, move it away and start with --rebuild"
            )
            raise Refused(
                RefusalCode.UNKNOWN_NAME,
                f"slave {name!r} is not one of this run's {len(expected)} slaves ({', '.join(expected)}): start it "
                "under one of these names, or start the master with more slaves"
                + (newer if body.promised_epoch > shared.epoch else ""),
            )
        # A slave that this process has not welcomed promised this epoch to another master: a lost or an old journal.
        taken = body.promised_epoch == shared.epoch and name not in self._welcomed
        if body.promised_epoch > shared.epoch or taken:
            sentence = (
                f"slave {name} has promised epoch {body.promised_epoch} to another master, this one's is "
                f"{shared.epoch}: that one still serves this run, or this master's directory is lost or an old copy"
            )
            self._overtaken(body.promised_epoch, sentence)
            raise Refused(RefusalCode.STALE_EPOCH, sentence)
        return agreement

    def _check_directory(self, slave: Slave | None, body: messages.SlaveHello) -> None:
        """Checks the slave's directory. A slave that starts again on its own directory is accepted at once.

        Another directory with its name is a second process or a replaced disk: it gets the name once the known process
        is gone, so that what the known one holds is not lost before.
        """
        shared = self._shared
        if slave is None or slave.directory_id in (b"", body.directory_id):
            return
        if slave.link is None and shared.now_s >= slave.held_until_s:
            return
        there = f" at {slave.endpoint}" if slave.link is not None else ""
        known = f"attached{there} with the directory identity {slave.directory_id.hex()[:12]}"
        remedy = "stop one of the two; to give a slave a new disk, stop its process first"
        refused = self._claims.refuse(
            "slave", slave.id, body.directory_id, known, remedy, shared.now_s, shared.config.evict_after_s
        )
        shared.log(f"second slave {slave.id}", f"refused at {body.data_endpoint}: {refused}", logging.WARNING)
        raise refused

    def _expected(self) -> list[SlaveId]:
        """The slaves whose hello is accepted: those that hold blocks, that a RESHARD adds, or that a record of a
        recovery names."""
        shared = self._shared
        pending = shared.ledger.reshard
        return sorted({*shared.slaves_expected(), *(pending.add if pending else ()), *shared.recovery.named})

    def _all_places_taken(self, body: messages.SlaveHello) -> bool:
        """Whether another slave may not attach.

        A rebuild does not know the run's slaves. In addition to n_slaves of any kind it accepts those that hold
        versions, so that one that a RESHARD had removed takes no other's place.
        """
        shared = self._shared
        holds_versions = any(info.committed for info in body.snapshots)
        looks_for_versions = shared.config.rebuild and shared.ledger.commit is None and holds_versions
        most = REBUILD_SLAVES if looks_for_versions else shared.config.n_slaves
        return shared.ledger.placement is not None or len(self._expected()) >= max(most, shared.config.n_slaves)

    def _overtaken(self, epoch: int, sentence: str) -> None:
        """Gives up this epoch, which another master used: rounds and pushes would share names. Once a rebuild has
        published, that master came later."""
        shared = self._shared
        if shared.config.rebuild and shared.published is None:
            shared.out.put(BeginAgain(epoch + 1, f"{sentence}; --rebuild: a newer epoch begins"))
        else:
            shared.halt(
                NEWER_EPOCH_EXIT,
                f"{sentence}: stop the other one; if there is none, start this one with `dips master --rebuild`",
            )

    def _promised(self, slave: Slave, body: messages.Promised, cause: str) -> None:
        shared = self._shared
        if body.epoch != shared.epoch or slave.phase.now is not SlavePhase.ATTACHED:
            return
        slave.phase.move("promised", SlavePhase.PROMISED, shared.now_s, cause)
        self._recovery.promised(slave)
        self._reshard.slave_came()

    # ---- reports ----

    def _dispatch(self, slave: Slave, message: messages.SlaveMessage) -> None:
        cause = message.caller.cause_id
        match message.body:
            case messages.SlaveBeat() as beat:
                self._note_refused(slave, beat)
                slave.beat = replace(beat, note=beat.note[:MAX_REASON_CHARACTERS])
                slave.durable = beat.durable or slave.durable
                self._pushes.progress(slave, beat)
            case messages.Promised() as body:
                self._promised(slave, body, cause)
            case messages.Ready() as body:
                self._ready(slave, body, cause)
            case messages.ConfigureRefused() as body if slave.phase.now is SlavePhase.CONFIGURING:
                self._configure_refused(slave, body)
            case messages.CommitRecord() as body:
                self._recovery.record_came(slave, body)
            case messages.Staged() as body if slave.ready:
                self._pushes.staged(slave, body)
            case messages.Measured() as body:
                self._rounds.measured(slave, body)
            case messages.ShardList() as body:
                self._reshard.listed(slave, body)
            case messages.Prepared() as body:
                if not self._reshard.prepared(slave, body):
                    self._rounds.prepared(slave, body)
            case messages.RoundRefused() as body if body.command == "commit":
                self._commit_refused(slave, body)
            case messages.RoundRefused() as body:
                if not self._reshard.refused(slave, body):
                    self._rounds.refused(slave, body)
            case messages.Flipped() as body:
                self._rounds.flipped(slave.id, body.version)
            case _:
                pass  # a Staged of a slave that is not ready yet: its stagings are not open

    def _note_refused(self, slave: Slave, beat: messages.SlaveBeat) -> None:
        """Logs the connections that a slave's data port refused, one line for each beat."""
        total, before = beat.refused_connections, slave.beat.refused_connections
        fresh = total - before if total >= before else total  # a new process counts from 0
        if not fresh:
            return
        shared, reason = self._shared, beat.refused_connection[:MAX_REASON_CHARACTERS]
        shared.record(tape.ConnectionsRefused(str(slave.incarnation), slave=slave.id, count=fresh, last_reason=reason))
        sentence = f"slave {slave.id} refused {fresh} connections at its data port ({total} in all), the last: {reason}"
        shared.log(f"refused at {slave.id}", sentence, logging.WARNING)

    def _configure_refused(self, slave: Slave, body: messages.ConfigureRefused) -> None:
        """Handles a slave that cannot load: it retries a failing disk itself; a lost snapshot begins a recovery."""
        shared, refusal = self._shared, body.refusal
        slave.trouble = refusal.sentence
        shared.log(f"slave {slave.id}", f"slave {slave.id}: {refusal.sentence}", logging.ERROR)
        loads = shared.ledger.commit is not None and not shared.recovery.donating
        if loads and refusal.code in LOST_CODES and not refusal.retry_after_s > 0:
            self._recovery.cannot_load(slave, refusal.sentence)

    def _commit_refused(self, slave: Slave, body: messages.RoundRefused) -> None:
        """Handles a slave that lost the shadow in memory: a new hello reports what its disk holds."""
        commit, sentence = self._shared.ledger.commit, body.refusal.sentence
        self._shared.log(f"slave {slave.id}", f"slave {slave.id} cannot commit: {sentence}", logging.WARNING)
        newest = commit is not None and body.round == commit.round
        if newest and slave.ready and body.refusal.code is RefusalCode.VERSION_GONE:
            self._links.send_away(slave, f"it has no shadow of round {body.round} in memory")

    def _ready(self, slave: Slave, body: messages.Ready, cause: str) -> None:
        shared = self._shared
        commit = None if shared.recovery.donating else shared.ledger.commit
        if slave.phase.now is not SlavePhase.CONFIGURING or body.version != (commit.version if commit else None):
            return
        if commit is not None and body.digest != dict(commit.digest_of_slave)[slave.id]:
            wrong = f"what it loaded as version {commit.version} has another digest than was committed"
            self._recovery.cannot_load(slave, wrong)
            return
        slave.phase.move("ready", SlavePhase.READY, shared.now_s, cause)
        slave.version, slave.durable, slave.trouble = body.version, body.version, ""
        shared.record(tape.SlaveReady(cause, slave=slave.id, version=body.version))
        shared.log(f"slave {slave.id}", f"slave {slave.id} is ready at version {body.version}")
        self._rounds.slave_back()
        for push in shared.pushes():
            if push.phase.now is PushPhase.TICKETED:
                self._pushes.open_staging(push, slave)
        if commit is not None:
            self._rounds.flipped(slave.id, commit.version)
            self._republish()

    def _republish(self) -> None:
        """Publishes the newest version once every slave holds it, after the master's restart or a recovery."""
        shared = self._shared
        commit = shared.ledger.commit
        committing = shared.round.phase.now is RoundPhase.COMMIT
        published = shared.published.version if shared.published else None
        if commit is None or committing or shared.recovery.active or published == commit.version:
            return
        if shared.all_slaves_ready():
            shared.published = shared.kept[commit.version] = Kept(commit, shared.ledger.tokens)
            shared.record(tape.VersionPublished(str(commit.round), version=commit.version, tokens=shared.ledger.tokens))

    def _of_link(self, link: int) -> Slave | None:
        return next((slave for slave in self._shared.slaves.values() if slave.link == link), None)

    def _new(self, name: SlaveId, memory_bytes: int) -> Slave:
        return Slave(name, memory_bytes, Phase(SLAVE_TABLE, self._shared.story, f"slave {name}"))


def _check_numbers(name: SlaveId, body: messages.SlaveHello) -> None:
    """Refuses numbers that no master gave out, before an epoch or a timeline is derived from them."""
    if len(body.directory_id) > MAX_DRAWN_BYTES:
        raise Refused(RefusalCode.MALFORMED, f"the directory identity of slave {name!r} is too long")
    timelines = [n for s in body.snapshots for n in (s.version.timeline, s.round.epoch, s.restored_timeline)]
    numbers = [body.promised_epoch, *timelines]
    counts = [n for s in body.snapshots for n in (s.version.v, s.round.n)]
    if max(numbers) > MAX_EPOCH or max(counts, default=0) >= MAX_WHOLE // 2:
        raise Refused(
            RefusalCode.MALFORMED,
            f"slave {name!r} names an epoch, version or round beyond anything that this run can have reached: its "
            "directory is damaged; restore it, or give it an empty one",
        )
