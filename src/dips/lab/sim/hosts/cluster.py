"""Simulates a training cluster's process around the real ClusterMachine: it steps, leases data, pushes and pulls.

Does what dips.worker.shell, heartbeat and transfers do, on virtual time: events wait while a step is made, and are
handled between steps. The run's arithmetic (dips.lab.sim.arithmetic) defines the parameters.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dips.core.errors import ConfigError, DipsError, RefusalCode, Refused, RemoteProtocolError
from dips.core.ids import Incarnation
from dips.core.messages import DataMode, HeartbeatReply, HeartbeatRequest, PullGrant
from dips.core.net.transfer import TransferSettings
from dips.core.wire import Codec
from dips.lab.sim.arithmetic import ClusterModel, Key, Value
from dips.lab.sim.content import CLEAN, KIND_NAMES, SimulatedModel
from dips.lab.sim.hosts.ranks import Ranks, same_vectors
from dips.lab.sim.world import Call, Host, World
from dips.worker.commands import Snapshot
from dips.worker.pace import StepTimer
from dips.worker.state import effects
from dips.worker.state.cluster import ClusterMachine
from dips.worker.state.effects import PushRecord, SendPush
from dips.worker.state.saved import SavedSession, push_from_json, push_to_json
from dips.worker.state.shared import Remedy, remedy_for

# ---- checkpoints -----------------------------------------------------------------------------------------------------
#
# A simulated cluster's checkpoints: what dips.worker.checkpoint writes, as the saved session's own JSON form and
# the model's content. A write takes time and is atomic; a push's number is used only after its record is
# durable.


SYMBOLS_ONLY = "a plan with checkpoints has symbols (Plan)"
EVERY_S = 3.0
RETRY_S = 0.5

OTHER_RANKS = "resumed_with_other_ranks"
"""A cluster went on from a checkpoint that another number of ranks had written; counted like a fault."""


@dataclass
class CheckpointDisk:
    """The checkpoints on disk, which outlive the process."""

    session_json: str = ""
    model: SimulatedModel | None = None
    parts: list[SimulatedModel] = field(default_factory=list)  # of the followers, where there were several ranks
    push_json: str = ""
    errors: int = 0  # so many of the next records of pushes cannot be written

    def lose(self) -> None:
        self.session_json, self.model, self.parts, self.push_json = "", None, [], ""


class Checkpoints:
    """One process's use of its cluster's directory; does nothing where the plan has no checkpoints."""

    def __init__(self, cluster: ClusterHost) -> None:
        self._cluster = cluster
        self._writing = False
        self._due_s = 0.0

    def begin_process(self) -> None:
        self._writing = False
        self._due_s = self._cluster.kernel.now_s + EVERY_S

    def put_back(self, model: ClusterModel) -> None:
        """Restore the saved vectors, which all ranks then have."""
        cluster, disk = self._cluster, self._cluster.checkpoint_disk
        if not cluster.world.plan.checkpoints or disk.model is None:
            return
        assert isinstance(model, SimulatedModel), SYMBOLS_ONLY
        if not all(same_vectors(part, disk.model) for part in disk.parts):
            cluster.world.violated(f"the checkpoint of {cluster.name} has vectors of different moments")
        for name in ("live", "base", "push", "pulled", "changes", "residual"):
            setattr(model, name, getattr(disk.model, name))
        model.changes += 1000 * cluster.generation  # what this incarnation trains is its own
        if len(disk.parts) + 1 != cluster.world.plan.pushers_of(cluster.name, cluster.life):
            cluster.world.fired(OTHER_RANKS)

    def resume(self, session: ClusterMachine) -> None:
        """Restore the saved state into a session that has not begun."""
        cluster, disk = self._cluster, self._cluster.checkpoint_disk
        if not cluster.world.plan.checkpoints or disk.model is None:
            return
        saved = SavedSession.from_json(json.loads(disk.session_json))
        newest = push_from_json(json.loads(disk.push_json)) if disk.push_json else None
        try:
            session.resume(saved, newest)
        except ConfigError as error:
            cluster.world.bug(cluster.name, error)
            return
        push = str(saved.push.id) if saved.push is not None else None
        fields = {"seq": saved.seq, "base": str(saved.base), "fence": saved.base_fence, "push": push}
        cluster.world.tape("worker", cluster, "resumed", "-", fields | {"incarnation": str(saved.incarnation)})

    def take_if_due(self, session: ClusterMachine, model: ClusterModel) -> None:
        """Write a checkpoint if it is due; called between two steps."""
        cluster = self._cluster
        if not cluster.world.plan.checkpoints or self._writing or cluster.kernel.now_s < self._due_s:
            return
        saved = session.saved()
        if saved is None:
            return
        assert isinstance(model, SimulatedModel), SYMBOLS_ONLY
        self._writing, self._due_s = True, cluster.kernel.now_s + EVERY_S
        text = json.dumps(saved.to_json())
        own = replace(model)
        cluster.live_ranks.take_checkpoint(self._write_s, lambda parts: self._written(text, own, parts, saved))

    def record_push(self, job: int, record: PushRecord) -> None:
        cluster = self._cluster
        cluster.kernel.after(self._write_s(), cluster, self._push_written, job, record)

    def _write_s(self) -> float:
        return self._cluster.kernel.jitter(self._cluster.world.plan.flush_s)

    def _written(self, text: str, model: SimulatedModel, parts: list[SimulatedModel], saved: SavedSession) -> None:
        """All ranks have written theirs: only now the checkpoint counts."""
        cluster, disk = self._cluster, self._cluster.checkpoint_disk
        self._writing = False
        disk.session_json, disk.model, disk.parts = text, model, parts
        cluster.world.tape("worker", cluster, "checkpoint", "-", {"seq": saved.seq, "base": str(saved.base)})

    def _push_written(self, job: int, record: PushRecord) -> None:
        cluster, disk = self._cluster, self._cluster.checkpoint_disk
        if disk.errors:
            disk.errors -= 1
            cluster.world.fired("cluster_disk_error")
            cluster.deliver(effects.Delayed(job, "no space left on device"))
            cluster.kernel.after(RETRY_S, cluster, self._push_written, job, record)
            return
        disk.push_json = json.dumps(push_to_json(record))
        cluster.deliver(effects.Done(job))


# ---- cluster ---------------------------------------------------------------------------------------------------------


PULL_WINDOW_CHUNKS = 16


class ClusterHost(Host):
    """One cluster's process; the next incarnation starts without state, or from its checkpoint."""

    def __init__(self, world: World, name: str, step_s: float) -> None:
        super().__init__(world, name)
        self.step_s = step_s
        self.step_jitter = world.plan.step_jitter
        self.pace = StepTimer()
        """Of this process."""

        self.session: ClusterMachine | None = None
        self.model: ClusterModel
        self.finished: effects.Finished | None = None
        self.next_push_kind = CLEAN
        self.steps = 0
        self.life = 0
        """How many processes it has had."""

        self.trained_s = 0.0
        """Virtual seconds that it spent on its steps."""

        self._queue: deque[effects.Event] = deque()
        self._stepping = False
        self._stepping_since_s = 0.0
        self._steps_end_s = 0.0
        """When the steps that were begun end; what arrives earlier waits for the end of one of them."""

        self._n_steps = 0
        self._step_took_s = 0.0
        self._busy_until_s = 0.0
        """Until when it copies parameters; everything waits for that."""

        self._waking_s = -1.0
        self.ranks: Ranks | None = None
        """The ranks of this process's life; None: it is not alive."""

        self._former: Ranks | None = None  # those of its last life, or this one

        self.followers_survive_s = 0.0
        """How long its followers go on when it ends, at least."""

        self._sent_as: dict[str, Codec] = {}
        self._told: tuple[Incarnation, HeartbeatReply] | None = None
        self._fenced: Incarnation | None = None
        self.checkpoint_disk = CheckpointDisk()
        self._checkpoints = Checkpoints(self)

    # ---- start and end ----

    def boot(self) -> None:
        self.begin_process()
        drawn = self.world.draw()
        self.world.began(self, drawn)
        plan = self.world.plan
        self.model = plan.arithmetic.model(self.name, self.generation, plan.layout, plan.config.settings.chunk_bytes)
        self.life += 1
        n_ranks = plan.pushers_of(self.name, self.life)
        self._checkpoints.put_back(self.model)
        if self._former is not None:
            self._former.stop()
        self.ranks = self._former = Ranks(self.world, self, self.model, n_ranks, self.step_s)
        config = plan.session_config(
            self.name, curve_key=self.world.key_of(self), process_id=drawn, rank_keys=self.ranks.keys, pushers=n_ranks
        )
        self.session = ClusterMachine(config)
        self.finished = None
        self.pace = StepTimer()
        self._checkpoints.begin_process()
        self._queue.clear()
        self._sent_as.clear()
        self._stepping, self._waking_s, self._busy_until_s = False, -1.0, 0.0
        self._told, self._fenced = None, None
        self._said_lost = False
        self.kernel.after(self.kernel.jitter(self.world.plan.config.settings.heartbeat_s), self, self._beat)
        self._checkpoints.resume(self.session)
        self._handle(effects.Started())
        self._settle()

    def kill(self) -> None:
        """kill -9."""
        if self.alive:
            self.world.killed("cluster")
        self.end()

    def end(self) -> None:
        """The process has ended, for any reason; its system resets the connection of its beats."""
        if self.session is not None:
            incarnation = self.session.shared.terms.incarnation
            for master in self.world.masters:
                if self.world.net.is_cut(self.name, master.at):
                    continue
                self.kernel.after(0.001, master, master.beats_ended, self.name, incarnation)
        self.end_process()
        self.session = None
        if self.ranks is not None:
            self.ranks.leader_ended(self.followers_survive_s)
            self.ranks, self.followers_survive_s = None, 0.0

    def lost_rank(self) -> None:
        """One of its followers is gone: the cluster ends with it, and torchrun starts all ranks again."""
        self.kernel.note(self.name, "a rank is gone")
        self.kill()
        self.world.died(self)

    # ---- the training loop ----

    def deliver(self, event: effects.Event) -> None:
        """Take an event from another thread; it is handled between steps."""
        if self.session is None:
            return
        self._queue.append(event)
        if self._stepping:
            # Something has arrived: only the step under way is finished
            if self._steps_end_s - self.kernel.now_s > self._step_took_s:
                made_s = self.kernel.now_s - self._stepping_since_s
                self._end_steps(math.floor(made_s / self._step_took_s) + 1)
        else:
            self._settle()

    def _settle(self) -> None:
        """Handle what has arrived; then train, or wait."""
        while self._queue and self.session is not None and not self.copying:
            self._handle(self._queue.popleft())
        session, now_s = self.session, self.kernel.now_s
        if session is None or self._stepping or self.copying:
            return
        if session.next_deadline_s() <= now_s:
            self._handle(effects.Tick())
        if self.session is None or self.copying:
            return
        self._checkpoints.take_if_due(session, self.model)
        if session.must_wait(now_s) or not self._has_data():
            self._wake(min(now_s + self.world.plan.longest_wait_s, max(session.next_deadline_s(), now_s)))
        else:
            self._step()
        self.world.settled(self)

    def _has_data(self) -> bool:
        """Whether there is data to train on; in leased mode, request more when too little is left."""
        session, plan = self.session, self.world.plan
        assert session is not None, "called only while it is alive"
        if plan.data.mode is DataMode.OWN:
            return True
        if sum(item.tokens for item in session.held) >= plan.least_held_tokens(self.name):
            return True
        self._handle(effects.LeaseWanted(plan.lease_tokens(self.name, session.shared.terms.local_steps)))
        return False

    def _step(self) -> None:
        """Begin the next inner step, or so many steps that the machine has nothing to decide before their end."""
        session, plan, now_s = self.session, self.world.plan, self.kernel.now_s
        assert session is not None, "called only while it is alive"
        self._stepping, self._stepping_since_s = True, now_s
        jitter = self.step_jitter
        took_s = self._step_took_s = self.kernel.rng.uniform(1 - jitter, 1 + jitter) * self.step_s
        n_steps = 1
        if plan.steps_at_once > 1:
            shared = session.shared
            n_steps = min(plan.steps_at_once, sum(item.tokens for item in session.held) // plan.step_tokens(self.name))
            if shared.steps_towards_push < shared.terms.local_steps:
                n_steps = min(n_steps, shared.terms.local_steps - shared.steps_towards_push)
            if (due_s := session.next_deadline_s()) < now_s + n_steps * took_s:
                n_steps = math.ceil((due_s - now_s) / took_s)
        self._end_steps(max(1, n_steps))

    def _end_steps(self, n_steps: int) -> None:
        """So many of the steps since _stepping_since_s are made before anything else."""
        self._n_steps = n_steps
        self._steps_end_s = self._stepping_since_s + n_steps * self._step_took_s
        self.kernel.at(self._steps_end_s, self, self._stepped, self._steps_end_s)

    def _wake(self, at_s: float) -> None:
        if at_s < self._waking_s or self._waking_s <= self.kernel.now_s:
            self._waking_s = at_s
            self.kernel.at(at_s, self, self._woken, at_s)

    def _woken(self, at_s: float) -> None:
        if at_s == self._waking_s and not self._stepping and not self.copying and self.session is not None:
            self._waking_s = -1.0
            self._handle(effects.Tick())
            self._settle()

    def _stepped(self, end_s: float) -> None:
        if end_s != self._steps_end_s or not self._stepping:
            return  # they were ended earlier
        self._stepping = False
        if self.session is None:
            return
        plan, n_steps = self.world.plan, self._n_steps
        ranges = plan.batch_of(self.name, self.session.held, n_steps)
        tokens = sum(item.tokens for item in ranges) if ranges else plan.own_tokens(self.name, self.steps)
        loss = self.model.step(self.name, ranges, self.session.shared.terms.tokens + self.session.shared.work.tokens)
        self.steps, self.trained_s = self.steps + n_steps, self.trained_s + n_steps * self._step_took_s
        self.pace.resume(end_s - n_steps * self._step_took_s)
        self.pace.stepped(tokens, loss, end_s, n_steps)
        self._handle(effects.Stepped(tokens, ranges, loss, steps=n_steps))
        self._settle()

    @property
    def training(self) -> bool:
        """Whether a step is under way."""
        return self._stepping

    @property
    def copying(self) -> bool:
        """Whether parameters are copied to or from the transfer buffer."""
        return self.kernel.now_s < self._busy_until_s

    def _copy(self) -> None:
        """Everything waits for a copy of the parameters, as long as it takes."""
        copy_s = self.world.copy_s(self.name)
        if copy_s:
            self._busy_until_s = self.kernel.now_s + copy_s
            self.kernel.at(self._busy_until_s, self, self._settle)
            self.world.settled(self)

    @property
    def trained_until_now_s(self) -> float:
        """trained_s plus the time of the step under way."""
        return self.trained_s + (self.kernel.now_s - self._stepping_since_s if self._stepping else 0.0)

    @property
    def next_seq(self) -> int:
        """The number of the next push that it begins."""
        return self.session.pushing.seq + 1 if self.session is not None else 1

    def stop_soon(self, reason: str) -> None:
        self.deliver(effects.StopWanted(reason))

    # ---- events and effects ----

    def _handle(self, event: effects.Event) -> None:
        if self.session is None:
            return
        try:
            before = self.model.residual_mark
            outputs = self.session.handle(event, self.kernel.now_s)
            for number, effect in enumerate(outputs):
                if number and self.dies_after and self.dies_here():
                    self.struck_dead("crash_cluster_in_step")
                if self.alive and self.copying:
                    self.kernel.at(self._busy_until_s, self, self._carry_out, effect)
                elif self.alive:
                    self._carry_out(effect)
            if self.session is not None:
                residuals = (before, self.model.residual_mark)
                self.world.cluster_handled(self.name, self.session, outputs, residuals, self._sent_as)
        except (DipsError, AssertionError, LookupError, ValueError, TypeError) as error:
            self.world.bug(self.name, error)
            self.end()

    def _carry_out(self, effect: effects.Effect) -> None:
        match effect:
            case effects.Run():
                self._begin(effect.job, effect)
            case effects.Cancel(job):
                self.live_ranks.cancel(job)
            case effects.CopyParameters():
                self._snapshot()
                self.live_ranks.do(Snapshot(may_stay_live=False, whole=False), self.model)
                self._copy()
            case effects.CopyBase():
                self.model.copy_base()
                self.live_ranks.do(effect, self.model)
            case effects.Install():
                self.model.install(self.name, effect)
                self.live_ranks.do(effect, self.model)
                self._copy()
            case effects.KeepResidual(wire):
                self.model.keep_residual(wire)
                self.live_ranks.do(effect, self.model)
            case effects.ClearResidual():
                self.model.clear_residual()
                self.live_ranks.do(effect, self.model)
            case effects.Record():
                self.world.tape("worker", self, effect.kind, effect.cause, effect.fields)
            case effects.Log(_, key, sentence):
                self._said_lost |= key == "lost"
                self.world.log(self.name, key, sentence)
            case effects.Finished():
                self._finish(effect)
            case _:
                raise LookupError(f"no one carries out {type(effect).__name__}")

    @property
    def live_ranks(self) -> Ranks:
        assert self.ranks is not None, "called only while it is alive"
        return self.ranks

    def _begin(self, job: int, run: effects.Run) -> None:
        match run.command:
            case PushRecord() as record:
                self._checkpoints.record_push(job, record)
            case SendPush() as push:
                self._start_push(job, push)
            case PullGrant() as grant:
                self._start_pull(job, grant)
            case request:
                Call(self.world, self, request, run.deadline_s, lambda result: self._answered(job, result))

    def _answered(self, job: int, result: Any) -> None:
        self.deliver(effects.Failed(job, result) if isinstance(result, str) else effects.Done(job, result))

    def _finish(self, effect: effects.Finished) -> None:
        self.kernel.note(self.name, f"finished: {effect.reason}")
        self.finished = effect
        if self.session is not None and self.session.unshared.steps and not self._said_lost:
            self.world.violated(f"{self.name} left without {self.session.unshared}, and did not say so")
        if isinstance(effect.error, RemoteProtocolError):
            self.world.bug(self.name, effect.error)
        if isinstance(effect.error, Refused) and effect.error.code is RefusalCode.TOKENS:
            self.world.violated(f"{self.name} counts well, and is refused: {effect.error.sentence}")
        self.end()
        self.world.cluster_ended(self, effect)

    # ---- parameters and transfers ----

    def _snapshot(self) -> None:
        kind, self.next_push_kind = self.next_push_kind, CLEAN
        if self.model.snapshot(self.name, kind):
            self.world.fired(KIND_NAMES[kind])

    def _start_push(self, job: int, push: SendPush) -> None:
        wire = self._sent_as[str(push.push)] = push.ticket.wire
        session, vector = self.session, self.model.sent(wire)
        assert session is not None, "it decided this just now"
        terms = session.shared.terms
        self.world.pushing(push.push, wire, vector)
        limits = self._limits(terms.settings.chunk_bytes, terms.settings.window_chunks)
        self.live_ranks.push(job, push.push, push.ticket, vector, limits, terms.run_id, terms.epoch, self._pushed)

    def _pushed(self, end: effects.Done | effects.Failed, values: Mapping[Key, Value]) -> None:
        if isinstance(end, effects.Failed) and end.base_gone:
            self.world.fired("base_gone")
        self.deliver(end)

    def _start_pull(self, job: int, grant: PullGrant) -> None:
        limits = self._limits(grant.chunk_bytes, PULL_WINDOW_CHUNKS)
        self.live_ranks.pull(job, grant, limits, partial(self._pulled, grant), self.model)

    def _pulled(self, grant: PullGrant, end: effects.Done | effects.Failed, values: Mapping[Key, Value]) -> None:
        if isinstance(end, effects.Done):
            self.world.pulled(self.name, grant.version, values)
            self.model.fetched(values)
        elif end.base_gone:
            self.world.fired("differences_gone")
        self.deliver(end)

    def _limits(self, chunk_bytes: int, window_chunks: int) -> TransferSettings:
        plan = self.world.plan
        return TransferSettings(chunk_bytes, window_chunks, plan.data_silence_s, plan.data_stall_s)

    # ---- heartbeats: a thread of their own, so they go on during steps ----

    def _beat(self) -> None:
        session = self.session
        if session is None:
            return
        core = session.shared
        incarnation = core.terms.incarnation
        if incarnation is not None and incarnation != self._fenced:
            settings = core.terms.settings
            tokens_per_s, steps_per_s = self._told_pace()
            request = HeartbeatRequest(
                core.terms.caller(core.cause), session.phase.value, core.steps, tokens_per_s, steps_per_s,
                push_s=core.push_s, pull_s=core.pull_s, base=core.base, note=core.note,
            )  # fmt: skip
            wait_s = settings.heartbeat_s * settings.evict_after_beats
            Call(self.world, self, request, wait_s, lambda result: self._beaten(incarnation, result))
        self.kernel.after(self.world.plan.config.settings.heartbeat_s, self, self._beat)

    def _told_pace(self) -> tuple[float, float]:
        """(tokens, steps) a second, as its beats say."""
        plan = self.world.plan
        if plan.measured_pace:
            return self.pace.tokens_per_s, self.pace.steps_per_s
        return plan.step_tokens(self.name) / self.step_s, 1 / self.step_s

    def _beaten(self, incarnation: Incarnation, result: Any) -> None:
        if isinstance(result, HeartbeatReply):
            if self._told != (incarnation, result):
                self._told = (incarnation, result)
                self.deliver(effects.Beat(incarnation, result))
        elif isinstance(result, Refused):
            if remedy_for(result, joining=False, pushing=False) is Remedy.JOIN_AGAIN:
                self._fenced = incarnation
            self.deliver(effects.Beat(incarnation, result))
