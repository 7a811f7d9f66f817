"""A random walk through one run: everything that surrounds the master does something, at random, one step at a time.

Deterministic for a seed; time is turned by hand. The checks that hold after every step stand in walk_checks.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from support.walk_checks import Checks
from support.walk_cluster import WalkCluster
from support.walk_slave import WalkBench, WalkSlave

from dips.core.errors import RefusalCode
from dips.core.ids import PushId, Version
from dips.core.messages import (
    BeginPullRequest,
    Caller,
    DataMode,
    DataPlan,
    DrainRequest,
    EvictRequest,
    FinishPullRequest,
    OperatorRequest,
    Refusal,
    Settings,
    SlaveBeat,
    SlaveHello,
    StatusRequest,
)
from dips.core.seen import Seen
from dips.master.state.events import CallGone, ClusterCall, OperatorCall, Pause, Resume, Stop, Tick

PLAN = DataPlan(DataMode.LEASED, b"corpus", 60, 10)
STEP_S = 0.5


class Walk:
    """Three clusters, two slaves, one master and a clock."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        settings = Settings(max_staleness_versions=3, dynamic_local_steps=seed % 2 == 1)
        times: dict[str, Any] = {"round_timeout_s": 8.0, "ticket_ttl_s": 20.0, "lease_ttl_s": 40.0, "linger_s": 5.0}
        self.bench = WalkBench(2, PLAN, settings, max_clusters=4, grace_s=1.0, **times)
        self.bench.hold_journal = True
        self.bench.slaves = [WalkSlave(self.bench, name) for name in ("s0", "s1")]
        self.slaves: list[WalkSlave] = self.bench.slaves  # type: ignore[assignment]
        self.clusters = [WalkCluster(name, "test", PLAN, self.send, self) for name in ("a", "b", "c")]
        self.open: dict[int, tuple[WalkCluster, int]] = {}
        self.late: list[Any] = []
        self.asked: list[Any] = []
        self.durable = 0
        self.restored = 0
        self.disk_full_at: int | None = None
        self.checks = Checks(self)
        self.ticked_at_s = self.bench.now_s
        self.seen = Seen()
        """Transitions and refusals of all steps."""
        with self.seen.watching():
            for slave in self.slaves:
                slave.attach()

    # ---- one step ----

    def step(self) -> None:
        kinds, weights = zip(*self._steps(), strict=True)
        with self.seen.watching():
            self.rng.choices(kinds, weights)[0]()
            self.settle()

    def _steps(self) -> list[tuple[Callable[[], None], float]]:
        return [
            (self._work, 60),
            (self._land, 40),
            (self._slave_moves, 60),
            (self._flush, 20),
            (self._write, 40),
            (self._time, 12),
            (self._slave_returns, 6),
            (self._cluster_returns, 6),
            (self._all_well, 3),
            (self._late_call, 3),
            (self._repeat_call, 3),
            (self._repeat_word, 3),
            (self._hang_up, 1),
            (self._new_attempt, 1),
            (self._give_back, 1),
            (self._reader, 1),
            (self._operator, 0.7),
            (self._cluster_dies, 0.7),
            (self._cluster_restarts, 0.7),
            (self._leave, 0.5),
            (self._slave_dies, 0.7),
            (self._disk_is_lost, 0.5),
            (self._slave_forgets_to_answer, 0.3),
            (self._nonfinite, 0.7),
            (self._disk_trouble, 0.5),
            (self._stand_still, 0.2),
            (self._restart_master, 0.3),
        ]

    def settle(self) -> None:
        """Hand out answers, end closed streams, check everything."""
        self._answers()
        for link in list(self.bench.closed):
            del self.bench.closed[link]
            slave = self.bench.by_link.get(link)
            if isinstance(slave, WalkSlave) and slave.link == link and slave.alive:
                slave.die()
        self._answers()
        self.checks.all()

    def _answers(self) -> None:
        for token in [*self.bench.replies, *self.bench.refusals]:
            reply = self.bench.replies.pop(token, None)
            answer: Any = self.bench.refusals.pop(token, None) if reply is None else reply
            body = getattr(answer, "answer", answer)
            self.checks.told(body)
            cluster, life = self.open.pop(token, (None, 0))
            if cluster is not None and cluster.life == life:
                cluster.hear(body)

    def send(self, cluster: WalkCluster, request: Any) -> None:
        self.asked = [*self.asked[-40:], request]
        if self.rng.random() < 0.05:
            self.late.append(request)  # its caller does not wait for it
            return
        token = self.bench._token = self.bench._token + 1
        self.open[token] = (cluster, cluster.life)
        self.bench.event(ClusterCall(token, request))

    def copied(self, push: PushId, version: Version) -> None:
        self.bench.donations[push] = (version, self.rng.random() < 0.9)

    def digests(self, push: PushId) -> tuple[tuple[str, bytes], ...]:
        return tuple((slave.name, slave.digest_of_push(push)) for slave in self.slaves)

    def call(self, request: Any) -> None:
        """A call of nobody who listens."""
        token = self.bench._token = self.bench._token + 1
        self.bench.event(ClusterCall(token, request))

    # ---- clusters ----

    def _some(self) -> WalkCluster:
        return self.rng.choice(self.clusters)

    def _waits(self, cluster: WalkCluster) -> bool:
        return any(waiting is cluster and life == cluster.life for waiting, life in self.open.values())

    def _work(self) -> None:
        cluster = self._some()
        if cluster.alive and (not self._waits(cluster) or self.rng.random() < 0.05):
            cluster.work()

    def _land(self) -> None:
        for cluster in self.clusters:
            if cluster.push is not None and cluster.push.attempt:
                self.rng.choice(self.slaves).land(cluster.push.id)

    def _late_call(self) -> None:
        if self.late:
            self.call(self.late.pop(self.rng.randrange(len(self.late))))

    def _repeat_call(self) -> None:
        if self.asked:
            self.call(self.rng.choice(self.asked))

    def _hang_up(self) -> None:
        if self.open:
            token = self.rng.choice(list(self.open))
            del self.open[token]
            self.bench.event(CallGone(token))

    def _new_attempt(self) -> None:
        self._some().again()

    def _give_back(self) -> None:
        self._some().give_back()

    def _leave(self) -> None:
        self._some().leave()

    def _cluster_dies(self) -> None:
        self._some().alive = False

    def _cluster_restarts(self) -> None:
        """Another process under the same name, or the same one that was cut off."""
        cluster = self._some()
        if self.rng.random() < 0.5:
            cluster.forget()
        cluster.alive = True
        cluster.ask_join()

    def _cluster_returns(self) -> None:
        cluster = self._some()
        if not cluster.alive:
            cluster.alive = True
            cluster.work()

    def _reader(self) -> None:
        caller = Caller("", 0, self.rng.choice(("eval", "export", "picture")))
        self.call(BeginPullRequest(caller, True))
        if self.rng.random() < 0.5:
            self.call(FinishPullRequest(caller, self.rng.randrange(20), True))

    # ---- slaves ----

    def _slave_moves(self) -> None:
        slave = self.rng.choice(self.slaves)
        if slave.alive and slave.inbox and (not slave.outbox or self.rng.random() < 0.5):
            slave.hear()
        elif slave.alive and slave.outbox:
            slave.speak()

    def _flush(self) -> None:
        while any([slave.settle() for slave in self.slaves]):
            pass

    def _slave_dies(self) -> None:
        slave = self.rng.choice(self.slaves)
        if slave.alive:
            slave.die()

    def _disk_is_lost(self) -> None:
        """It dies, and what it finds on its disk is older, or nothing at all.

        A first version that no cluster pulled yet could come back from nowhere: the run would have to begin anew.
        """
        if not all(slave.archive for slave in self.slaves):
            return
        slave = self.rng.choice(self.slaves)
        if slave.alive:
            slave.die()
        slave.lose_disk(self.rng.choice((0, 0, 1, 2)))

    def _slave_returns(self) -> None:
        for slave in self.slaves:
            if not slave.alive:
                slave.attach()

    def _slave_forgets_to_answer(self) -> None:
        slave = self.rng.choice(self.slaves)
        if slave.outbox and not isinstance(slave.outbox[-1].message.body, SlaveHello):
            slave.outbox.pop()

    def _repeat_word(self) -> None:
        slave = self.rng.choice(self.slaves)
        if slave.said:
            message = self.rng.choice(slave.said)
            if message.link == slave.link or not isinstance(message.message.body, SlaveHello):
                self.bench.event(message)

    def _nonfinite(self) -> None:
        name = self._some().name
        self.bench.nonfinite[name] = 0 if self.bench.nonfinite.get(name) else 3

    def _disk_trouble(self) -> None:
        slave = self.rng.choice(self.slaves)
        code = self.rng.choice((RefusalCode.DISK, RefusalCode.NONFINITE))
        if slave.refuse:
            slave.refuse.clear()
        else:
            slave.refuse["prepare"] = Refusal(code, "trouble")

    def _all_well(self) -> None:
        self.bench.nonfinite.clear()
        for slave in self.slaves:
            slave.refuse.clear()

    # ---- master, operator, time ----

    def pending(self) -> list[Any]:
        return self.bench.journal[self.durable :]

    def _write(self) -> None:
        """The disk takes the oldest entry."""
        if self.pending() and self.durable != self.disk_full_at:
            self.durable += 1
            self.bench.write_journal(self.bench.journal[self.durable - 1])

    def _time(self) -> None:
        for _ in range(self.rng.choice((1, 1, 2, 6))):
            self.bench.now_s += STEP_S
            self.beat()
            self.tick()

    def tick(self) -> None:
        self.ticked_at_s = self.bench.now_s
        self.bench.event(Tick())

    def beat(self) -> None:
        for slave in self.slaves:
            if slave.alive and slave.incarnation is not None:
                slave.say(SlaveBeat())
                slave.settle() if self.rng.random() < 0.3 else None
        for cluster in self.clusters:
            if cluster.alive and cluster.joined:
                cluster.beat()

    def _stand_still(self) -> None:
        self.bench.now_s += 100.0
        self.tick()

    def _operator(self) -> None:
        name = self._some().name
        request = OperatorRequest("", "because")
        actions = [Pause(request), EvictRequest("", name), DrainRequest("", name), StatusRequest("")]
        self.operate(Resume(request) if self.bench.state.world.ledger.paused else self.rng.choice(actions))

    def operate(self, action: Any) -> None:
        token = self.bench._token = self.bench._token + 1
        self.bench.event(OperatorCall(token, action))

    def _restart_master(self) -> None:
        self.restart_master(self.rng.randint(0, len(self.pending())))

    def restart_master(self, written: int) -> None:
        """So many entries are durable although the master never learnt it."""
        keep = self.durable + min(written, len(self.pending()))
        del self.bench.journal[keep:]
        self.durable = keep
        self.bench.snapshot = self.bench.journal[-1].snapshot_json if self.bench.journal else None
        self.checks.forget(keep)
        self.open.clear()
        self.bench.replies.clear()
        self.bench.refusals.clear()
        self.bench.closed.clear()
        for slave in self.slaves:
            slave.alive = False
        self.bench.start_master()

    # ---- the end ----

    def heal(self) -> None:
        """Everything is well again; only the first cluster lives on, and hears no answer to what it asked before."""
        self._all_well()
        self.late.clear()
        self.operate(Resume(OperatorRequest("")))
        for slave in self.slaves:
            slave.attach()
        self.bench.donations = {push: (version, True) for push, (version, _) in self.bench.donations.items()}
        for cluster in self.clusters[1:]:
            cluster.alive = False
        self.clusters[0].alive = True
        for token in list(self.open):
            if self.open[token][0] is self.clusters[0]:
                del self.open[token]

    def live_on(self, until: Callable[[], bool], limit_s: float) -> bool:
        """The first cluster does as it should; whether `until` came true in time."""
        cluster = self.clusters[0]
        end_s = self.bench.now_s + limit_s
        while not until() and self.bench.now_s < end_s:
            self._restore_if_nothing_else_helps()
            self._slave_returns()
            for _ in range(6):
                if not until():
                    self._all_go_on(cluster)
            self._time()
            self.settle()
        return until()

    def _restore_if_nothing_else_helps(self) -> None:
        """The master says that no cluster has a copy: an operator brings the snapshots back."""
        if "restore a slave's directory" in self.bench.state.world.recovery.words:
            self.restored += 1
            for slave in self.slaves:
                slave.die()
                slave.restore()
                slave.attach()

    def _all_go_on(self, cluster: WalkCluster) -> None:
        for _ in self.pending():
            self._write()
        self._flush()
        self._land()
        self._flush()
        if cluster.alive and not self._waits(cluster):
            cluster.work()
        self.settle()

    @property
    def newest_v(self) -> int:
        """Number of the newest version that was committed; -1: none."""
        version = self.bench.state.world.ledger.version
        return -1 if version is None else version.v

    @property
    def committed(self) -> int:
        """Rounds that made a version, rollbacks aside."""
        return self.bench.state.world.ledger.rounds_committed

    def published(self, committed: int) -> bool:
        """Whether so many rounds made a version, and the newest is published."""
        return self.committed >= committed and self.bench.state.world.everything_out

    def sealed_rounds(self) -> int:
        """Rounds that began for pushes, not for a donation."""
        inputs = [r.fields["input"] for r in self.bench.records if r.kind == "round"]
        return inputs.count("window closed") - inputs.count("it is a donation")

    def stop(self) -> None:
        self.operate(Stop(OperatorRequest("", "enough")))
