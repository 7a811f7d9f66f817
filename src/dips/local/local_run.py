"""A whole run as processes of this machine: starts them in order, keeps them alive, watches, and ends them.

The owner decides what the run is (settings, data, faults), and what is shown of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from dips.core.clock import Clock
from dips.core.errors import TERMINATED, ConfigError, FatalError, RefusalCode, Refused, RetryLater
from dips.core.messages import StatusReply
from dips.core.net.keys import load_identity
from dips.core.net.security import INSECURE
from dips.core.observe.tape import STARTING, Tape
from dips.core.units import format_seconds
from dips.local.authority import OPERATOR, ensure_keys
from dips.local.log_files import tape_path
from dips.local.operator_client import OperatorClient
from dips.local.processes import (
    EVALUATOR,
    MASTER,
    RunPlan,
    TrainedCluster,
    master_spec,
    other_specs,
)
from dips.local.run_directory import RunDirectory
from dips.local.supervisor import POLL_S, TELL_EVERY_S, ChildEvent, ProcessSupervisor
from dips.master.directory import read_address
from dips.master.page.access import read_page_url
from dips.master.page.history import TapeTail

STATUS_EVERY_S = 0.5
_STATUS_CALL_S = 5.0
SILENT_S = 5.0
"""A master that is started again answers sooner; one that hangs does not."""

_MASTER_START_S = 600.0
"""A machine that does much else may take minutes; a master that ends instead is noticed at once."""

_END_S = 60.0
_ALONE_S = 5.0
"""After the end of the master and of the slaves that it could tell. Another one, such as one that was about to attach,
would look for the master for ever, and gets a signal.
"""

_STOP_AGAIN_S = 1.0

LAUNCH_TAPE = "launch"

T = TypeVar("T")


class LocalRun:
    """A run on this machine. Use as a context manager: leaving it ends every process of the run.

    `tell` gets a sentence whenever a process starts, dies or ends. `stall_s` bounds how long the run may
    apply no token while it is neither paused nor finished; 0: for ever.
    """

    def __init__(
        self,
        plan: RunPlan,
        directory: RunDirectory,
        clock: Clock,
        tell: Callable[[str], None],
        stall_s: float = 0.0,
    ) -> None:
        self.plan = plan
        self.status: StatusReply | None = None
        self.speeds: dict[str, float] = {}
        self.address = ""
        self.page_url: str | None = None
        """URL of the status page, with the token that gives access; None when there is none."""
        self.directory = directory
        self._clock = clock
        self._tell = tell
        self._tape = Tape(tape_path(directory.path, LAUNCH_TAPE), "launch", "launch", clock, may_lose=True)
        self.supervisor = ProcessSupervisor(clock, self._child_event, log_format=plan.run.log_format)
        self._operator: OperatorClient | None = None
        self._next_status_s = 0.0
        self._master_ended = False
        self._stall_s = stall_s
        # Of the processes whose start may take long.
        tapes = {slave.slave_id: tape for slave in plan.slaves if (tape := slave.tape_used) is not None}
        for cluster in plan.clusters:
            own = cluster.client.tape_used if isinstance(cluster, TrainedCluster) else None
            tapes[cluster.cluster_id] = own or tape_path(directory.path, cluster.cluster_id)
        self._starts = {name: TapeTail(path, last_bytes=0) for name, path in tapes.items()}
        self._progress: tuple[int, float] = (-1, 0.0)
        self._answered_s: float | None = None  # when the master answered last
        self._said_silent_s = 0.0  # how long it was silent when that was said last; 0: it was not

    def __enter__(self) -> LocalRun:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process: clusters, then slaves, then the master. Safe to repeat."""
        if self._operator is not None:
            self._operator.close()
            self._operator = None
        self.supervisor.stop(self._tell)
        self._tape.close()

    # ---- start, watch, end ----

    def start(self, extend: bool = False) -> str:
        """Start everything; returns the master's address. Raises what a child's wrong settings raise.

        extend: take back the end of a run that was stopped; otherwise ConfigError for a run that has ended.
        """
        if self.plan.run.insecure:
            self._tell("INSECURE, as asked: nothing is encrypted and no one is authenticated, on loopback only")
        else:  # keys for everyone of the plan; those that an earlier start made stay
            operators = [OPERATOR, *([EVALUATOR] if self.plan.evaluate is not None else [])]
            clusters = [*self.plan.cluster_ids, *self.plan.run.keys_for]
            ensure_keys(self.directory.keys, clusters, self.plan.run.slave_ids, operators)
        self.supervisor.start(master_spec(self.plan, self.directory))
        self.address = self._once_there("the start of the master", self._masters_address)
        self.page_url = read_page_url(self.directory.master)
        security = INSECURE if self.plan.run.insecure else load_identity(self.directory.keys / OPERATOR)
        self._operator = OperatorClient(self.address, self.plan.run.id, _STATUS_CALL_S, security=security)
        # A master that is started again acts on a stop from its journal only after its first event, which is this call.
        self._once_there("the master's first answer", self._ask)
        self._refuse_ended_run(self._once_there("the master's answer", self._ask), extend)
        if extend:
            self._tell(self._once_there("the master's answer", lambda: self.answer(_take_back_end)))
        for spec in other_specs(self.plan, self.directory, self.address):
            self.supervisor.start(spec)
        return self.address

    def tick(self) -> StatusReply | None:
        """Look after the processes, and ask for the status when it is time; the new status, or None.

        Raises FatalError when a process cannot be kept alive or nothing moves for too long.
        """
        self.supervisor.poll()
        if self._master_ended:
            self.supervisor.restart_no_more()  # a cluster that came back now would look for the master in vain
        now_s = self._clock.monotonic_s()
        if now_s < self._next_status_s:
            return None
        self._next_status_s = now_s + STATUS_EVERY_S
        for name, tail in self._starts.items():
            for _, kind, fields in tail.events():
                if kind == STARTING:
                    self._tell(f"{name}: {fields.get('sentence')}")
                    self._progress = (self._progress[0], now_s)  # a long start is no standstill
        status = self._ask()
        if status is not None:
            self.status = status
            for cluster in status.clusters:
                if cluster.tokens_per_s > 0:
                    self.speeds[cluster.cluster_id] = cluster.tokens_per_s
            if status.tokens != self._progress[0] or status.paused or status.stopped:
                self._progress = (status.tokens, now_s)
        self._tell_silence(status is not None, self._clock.monotonic_s())  # a call may have taken its whole deadline
        if self._progress[1] == 0.0:
            self._progress = (-1, now_s)
        still_s = now_s - self._progress[1]
        if 0 < self._stall_s < still_s:
            why = (self.status.waiting_for if self.status else "") or "the master does not say why"
            raise FatalError(
                f"the run applied no token for {format_seconds(still_s)} ({why}): see the logs in "
                f"{self.directory.log(MASTER).parent}"
            )
        return status

    @property
    def finished(self) -> bool:
        """The run was stopped, and every process that ends by itself has ended well."""
        names = [*self.plan.cluster_ids, *([EVALUATOR] if self.plan.evaluate is not None else [])]
        stopped = self.status is not None and self.status.stopped
        # A master that ended well has answered for linger_s after the stop, whether we saw that status or not.
        return (stopped or self.supervisor.exit_code(MASTER) == 0) and self.supervisor.ended(names)

    @property
    def deserted(self) -> bool:
        """There were clusters, all of them have ended for good, no other one is there, and the run has not ended."""
        status = self.status
        if status is None or status.stopping or status.stopped or any(cluster.alive for cluster in status.clusters):
            return False
        return bool(self.plan.clusters) and self.supervisor.ended(self.plan.cluster_ids)

    def exit_codes(self) -> dict[str, int | None]:
        """Process name -> the last exit code; None while it runs."""
        names = [MASTER, *self.plan.run.slave_ids, *self.plan.cluster_ids]
        names += [EVALUATOR] if self.plan.evaluate is not None else []
        return {name: self.supervisor.exit_code(name) for name in names}

    def finish(self) -> None:
        """Once `finished`: let the master and the slaves end by themselves, for a bounded time."""
        names = [MASTER, *self.plan.run.slave_ids]
        here = [slave.slave_id for slave in self.status.slaves if slave.alive] if self.status is not None else []
        attached = [name for name in self.plan.run.slave_ids if name in here]  # a reshard may have brought others
        ask_s = self._clock.monotonic_s()
        deadline_s = ask_s + _END_S
        while not self.supervisor.ended(names) and (now_s := self._clock.monotonic_s()) < deadline_s:
            if self.supervisor.ended([MASTER, *attached]):
                deadline_s = min(deadline_s, now_s + _ALONE_S)
            elif now_s >= ask_s and not self.supervisor.ended([MASTER]):
                # Without it the master would serve for linger_s.
                self.answer(lambda operator: operator.stop("the run has ended"))
                ask_s = now_s + _STOP_AGAIN_S
            self.supervisor.poll()
            time.sleep(POLL_S)

    def record(self, kind: str, **fields: object) -> None:
        """Write to the launcher's own tape."""
        self._tape.write(kind, "launch", **fields)

    # ---- how ----

    def _once_there(self, what: str, find: Callable[[], T | None]) -> T:
        """What `find` returns as soon as that is not None; says now and then that it is waited for.

        Raises RetryLater after _MASTER_START_S, and what a child's wrong settings raise.
        """
        begin_s = self._clock.monotonic_s()
        tell_s = begin_s + TELL_EVERY_S
        while True:
            self.supervisor.poll()
            if (found := find()) is not None:
                return found
            now_s = self._clock.monotonic_s()
            if now_s >= begin_s + _MASTER_START_S:
                log = self.directory.log(MASTER)
                raise RetryLater(f"waited {format_seconds(_MASTER_START_S)} for {what}, in vain: see {log}")
            if now_s >= tell_s:
                tell_s = now_s + TELL_EVERY_S
                self._tell(f"still waiting for {what} ({format_seconds(round(now_s - begin_s))})")
            time.sleep(POLL_S / 2)

    def _masters_address(self) -> str | None:
        """None until the process that runs now has written it."""
        written = read_address(self.directory.master)
        return written.address if written is not None and written.pid == self.supervisor.pid(MASTER) else None

    def answer(self, request: Callable[[OperatorClient], T]) -> T | None:
        """What the master answers; None while it is away, or is just ending (BUSY): it may be starting again. Any other
        refusal is raised.
        """
        if self._operator is None:
            return None
        try:
            return request(self._operator)
        except RetryLater:
            return None
        except Refused as error:
            if error.code is not RefusalCode.BUSY:
                raise
            return None

    def _ask(self) -> StatusReply | None:
        return self.answer(lambda operator: operator.status())

    def _refuse_ended_run(self, status: StatusReply, extend: bool) -> None:
        reached = 0 < status.tk_max_tokens <= status.tokens
        if (status.stopping or status.stopped) and (reached or not extend):
            where = self.directory.path
            more = f"raise tk_max ({status.tk_max_tokens}) above that" if reached else "give `dips up` --extend"
            raise ConfigError(
                f"run {status.run_id} in {where} has ended after {status.tokens} tokens: {more} to continue it, or "
                "take its model with "
                f"`dips export {where} --to model.safetensors`; for a new run choose another id and "
                "directory, or remove this directory"
            )

    def _tell_silence(self, answers: bool, now_s: float) -> None:
        """Say that the master does not answer, again each time that its silence has doubled, and when that is over."""
        silent_s = now_s - (now_s if self._answered_s is None else self._answered_s)
        if answers:
            if self._said_silent_s:
                self._tell(f"the master answers again, after {format_seconds(round(silent_s))}")
            self._answered_s, self._said_silent_s = now_s, 0.0
        elif silent_s >= max(SILENT_S, 2 * self._said_silent_s) and not self._master_ended:
            self._said_silent_s = silent_s
            self._tell(
                f"the master has not answered for {format_seconds(round(silent_s))}: clusters train on, and nothing is "
                f"published until it does; its log is {self.directory.log(MASTER)}"
            )

    def _child_event(self, event: ChildEvent) -> None:
        self._tape.write(
            f"child_{event.kind}", "launch", child=event.name, life=event.start, pid=event.pid, code=event.exit_code
        )
        if event.name == MASTER and event.kind == "ended" and event.exit_code == 0:
            self._master_ended = True
            # It ends after the version at hand. One that missed the end of the run would wait for the master for ever.
            self.supervisor.terminate(EVALUATOR)
        ended_as_asked = event.kind == "stopped" and event.exit_code in (0, TERMINATED)
        if not ended_as_asked:
            self._tell(f"{event.name}: {event.sentence}")


def _take_back_end(operator: OperatorClient) -> str:
    """What the master says to `dips extend`."""
    try:
        return operator.extend(0, False, "dips up --extend")
    except Refused as error:
        if error.code is not RefusalCode.CONFIG:
            raise
        return "the run has not ended, so there is nothing to take back"  # its limit was looked at before
