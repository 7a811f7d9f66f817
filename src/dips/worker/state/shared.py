"""The state that the parts of a session share: terms, work, phase, calls to the master, and the list of effects.

Only parts of this package write to it, and only within one ClusterMachine.handle() call.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable

from dips.core.ids import Version
from dips.core.machine import MachineHistory, Phase
from dips.core.messages import AwaitVerdictRequest, ClusterRequest, DataRange, LeaveRequest, ReturnDataRequest
from dips.core.wire import DIFFERENCES, Codec
from dips.worker.state.effects import CallMaster, ClearResidual, Effect, KeepResidual, Log, Record
from dips.worker.state.terms import SESSION_TABLE, SessionConfig, SessionPhase, Terms
from dips.worker.state.waiting import ExchangeStage, RepeatedCall, WaitPolicy
from dips.worker.state.work import WorkBook

SIDE_LIMIT = 64
"""Most small calls waiting for the master; the oldest is dropped first (pins expire, a Join frees ranges)."""


class SharedState:
    """Shared state of one session."""

    def __init__(self, config: SessionConfig) -> None:
        self.config = config
        self.terms = Terms(config)
        self.work = WorkBook()
        self.story = MachineHistory()
        self.phase = Phase(SESSION_TABLE, self.story, f"session {config.cluster_id}")
        self.now_s = 0.0
        self.cause = f"{config.cluster_id}/join"
        self.exchange, self.data, self.side = (RepeatedCall(lambda: self.terms.times) for _ in range(3))
        self.base: Version | None = None
        self.base_fence = 0
        self.steps = 0
        """Inner steps of this incarnation."""
        self.steps_since_snapshot = 0
        """Steps that theta_now is ahead of theta_at_push."""
        self.steps_towards_push = 0
        self.patience = WaitPolicy()
        self.push_s = 0.0
        self.pull_s = 0.0
        self.window_closes_s = -math.inf
        """When the window of the last push's round closes, as the master said when it admitted the push."""
        self.leave_deadline_s = 0.0
        """Deadline of the call Leave."""
        self.note = ""
        self.donate: Version | None = None
        """The version that the master asks this cluster to donate."""
        self.donate_after_s = -math.inf
        self.residual = False
        """Whether the rounding residual of earlier pushes is kept, for the next push to carry."""
        self._side_queue: deque[Callable[[], ClusterRequest]] = deque(maxlen=SIDE_LIMIT)
        self._last_id = 0
        self._out: list[Effect] = []

    # ---- effects ----

    def emit(self, effect: Effect) -> None:
        self._out.append(effect)

    def take(self) -> list[Effect]:
        out, self._out = self._out, []
        return out

    def applied_as(self, wire: Codec | None) -> None:
        """The push was applied in this codec (None: no longer known): the residual advances.

        A push in float32 loses nothing, and carries no residual.
        """
        if wire in DIFFERENCES:
            self.residual = True
            self.emit(KeepResidual(wire))
        elif wire is None:
            self.clear_residual()

    def clear_residual(self) -> None:
        """Set the residual to zero: the steps that it comes from do not count."""
        if self.residual:
            self.residual = False
            self.emit(ClearResidual())

    def record(self, kind: str, **fields: object) -> None:
        self.emit(Record(kind, self.cause, fields))

    def log(self, key: str, sentence: str, level: int = logging.INFO) -> None:
        self.emit(Log(level, key, sentence, self.cause))

    def move(self, input_name: str, to: SessionPhase, why: str = "") -> None:
        self.phase.move(input_name, to, self.now_s, self.cause, why)

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    # ---- calls ----

    def ask(self, build: Callable[[], ClusterRequest], after_s: float = 0.0) -> None:
        """Send the exchange's next call, in place of the one before."""
        self.exchange.ask(build, self.now_s + after_s)

    def aside(self, build: Callable[[], ClusterRequest]) -> None:
        """Queue a small call that nothing waits for."""
        self._side_queue.append(build)

    def aside_ranges(self, ranges: tuple[DataRange, ...]) -> None:
        """Give ranges back to the master, FREE."""
        if ranges:
            cause = self.cause
            self.aside(lambda: ReturnDataRequest(self.terms.caller(cause), ranges))

    def asides_done(self) -> bool:
        return self.side.idle and not self._side_queue

    def forget_asides(self) -> None:
        self._side_queue.clear()
        self.side.cancel()

    def send_due(self) -> None:
        """Emit the calls whose time has come."""
        if self.side.idle and self._side_queue:
            self.side.ask(self._side_queue.popleft(), self.now_s)
        for lane in (self.exchange, self.data, self.side):
            call_id = self._last_id + 1
            request = lane.take(call_id, self.now_s)
            if request is not None:
                self._last_id = call_id
                self.emit(CallMaster(call_id, request, self._deadline_s(request)))

    def lane_of(self, call_id: int) -> RepeatedCall | None:
        """The lane that waits for this call; None: its answer came too late to matter."""
        return next((lane for lane in (self.exchange, self.data, self.side) if lane.call_id == call_id), None)

    def wake_s(self) -> float:
        return min(lane.due_s for lane in (self.exchange, self.data, self.side))

    def _deadline_s(self, request: ClusterRequest) -> float:
        if isinstance(request, LeaveRequest):
            return self.leave_deadline_s
        held_s = request.wait_s if isinstance(request, AwaitVerdictRequest) else 0.0
        return self.terms.times.call_deadline_s + held_s

    # ---- waiting ----

    def hold(self, stage: ExchangeStage) -> None:
        """The exchange reaches this stage: the training loop waits as long as the master's settings say."""
        self.patience.enter(stage, self.terms.settings, self.now_s)

    def train_on(self) -> None:
        """A peer cannot be reached: training goes on meanwhile."""
        self.patience.unusual()
        self.patience.train_on(self.now_s)
