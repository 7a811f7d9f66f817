"""Which process is harmed at which failpoint, and how a run is brought to pass through it.

Every name of the registry is here, or in ELSEWHERE with the test that passes through it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from support.fault_run import BRIEFLY_S, CLUSTERS, SLAVES, STOPPED_S, FaultRun

from dips.core.errors import Refused, RetryLater
from dips.core.ids import Incarnation
from dips.core.messages import WatchRequest
from dips.core.net.codec_protobuf import to_message
from dips.core.observe.failpoints import all_names, role_of
from dips.local.operator_client import OperatorClient
from dips.protos import operator_pb2_grpc

HARMS = ("crash", "stop", "error", "sleep")
SLEEP_S = 0.5
SETTLE_S = {"master": 0.15, "slave": 0.15, "worker": 1.0}
"""An error ends a process within this, or not at all. A cluster leaves the run first."""

AGAIN_S = 2.0
"""Between two tries to bring a run to a failpoint."""

ELSEWHERE: Mapping[str, str] = {
    "master.archive.before_prune": "tests/unit/master/test_archive.py",
    **{
        f"master.replica.before_{what}": "tests/slow/test_standby_process.py"
        for what in ("send", "hear", "receive", "acknowledge", "connect", "tell")
    },
    "worker.export.before_rename": "tests/unit/trainer/test_trainer_export.py",
    "worker.rpc.before_Status": "tests/unit/worker/test_follower.py",
    "worker.rpc.after_Status": "tests/unit/worker/test_follower.py",
    "master.rpc.before_ReturnData": "tests/integration/test_master_server.py",
    "master.rpc.after_ReturnData": "tests/integration/test_master_server.py",
    "worker.rpc.before_ReturnData": "tests/slow/test_overlap.py",
    "worker.rpc.after_ReturnData": "tests/slow/test_overlap.py",
}
"""Not reached by clusters without torch that wait for their verdicts, or only with megabytes of journal: the test that
runs through it."""

AT_BIRTH: Mapping[str, tuple[str, ...]] = {
    "master": (
        "master.journal.before_create",
        "master.journal.after_create",
        "master.address.before_rename",
        "master.address.after_rename",
        "master.directory.before_fsync",
    ),
    "s0": tuple(
        f"slave.{file}.{step}"
        for file in ("identity", "promise")
        for step in ("before_create", "before_fsync", "after_fsync", "before_rename", "after_rename")
    ),
    "s1": ("slave.ring.before_allocate", "slave.ring.after_allocate"),
}
"""Passed in the first life of a process in an empty directory, in this order; after a crash, in the next life again."""

ENDS_THE_RUN = ("master.rpc.before_Stop", "master.rpc.after_Stop")

ARROWS: tuple[str, ...] = (
    *("round.IDLE.push_admitted", "round.WINDOW.window_closed", "round.SEALED.checks_passed"),
    *("round.MEASURE.all_measured", "round.JUDGE.accepted", "round.PREPARE.all_prepared"),
    *("round.COMMIT.all_flipped", "round.PUBLISH.verdicts_sent"),
    *("push.TICKETED.all_slaves_staged_it", "push.STAGED.finish_push", "push.ADMITTED.window_sealed"),
    *("push.SEALED.applied", "slave.PROMISED.configure", "slave.CONFIGURING.ready", "slave.READY.lost"),
    *("slave_link.DETACHED.linked", "slave_link.GREETING.welcome", "slave_link.PROMISING.promise_saved"),
    *("slave_link.ATTACHED.unlinked", "slave_shard.READY.measure", "slave_shard.MEASURING.done"),
    *("slave_shard.READY.prepare", "slave_shard.PREPARING.done", "slave_shard.PREPARED.commit"),
    *("slave_shard.COMMITTING.done", "slave_shard.EMPTY.configure", "slave_shard.LOADING.done"),
    *("session.TRAINING.push_due", "session.BEGINNING_PUSH.ticket", "session.TRANSFERRING.sent"),
    *("session.FINISHING_PUSH.admitted", "session.AWAITING.verdict", "session.PULLING.installed"),
    *("session.JOINING.joined", "session.LEAVING.left"),
)
"""Arrows of state machines that every run passes, or is easily brought to; the rest belong to the simulation."""

ARROW_HARMS = ("crash", "stop", "sleep")


@dataclass(frozen=True)
class Fault:
    process: str
    point: str
    harm: str

    @property
    def spec(self) -> str:
        action = f"sleep({SLEEP_S:g})" if self.harm == "sleep" else self.harm
        return f"{self.point}=1*{action}"

    def __str__(self) -> str:
        return f"{self.harm} of {self.process} at {self.point}"


Trigger = Callable[[FaultRun, Fault], None]
"""Brings the run to the failpoint. May be refused, and is tried again."""


def _watch(client: OperatorClient) -> None:
    stub = operator_pb2_grpc.OperatorStub(client._channel)
    for _ in zip(range(2), stub.Watch(to_message(WatchRequest(interval_s=0.1)), timeout=5.0), strict=False):
        pass


def _wish(wish: Callable[[OperatorClient], object]) -> Trigger:
    def ask(run: FaultRun, _: Fault) -> None:
        with run.operator() as client:
            wish(client)

    return ask


def _cluster_of(fault: Fault) -> str:
    return fault.process if fault.process in CLUSTERS else "b"


def _evict(run: FaultRun, fault: Fault) -> None:
    with run.operator() as client:
        client.evict(_cluster_of(fault), "a test")


def _end_cluster(run: FaultRun, fault: Fault) -> None:
    run.will_end(_cluster_of(fault))
    run.children[_cluster_of(fault)].terminate()


def _drain(run: FaultRun, fault: Fault) -> None:
    name = _cluster_of(fault)
    run.may_die.add(name)
    with run.operator() as client:
        client.drain(name, "a test")
    run.will_end(name)


def _pause_and_resume(run: FaultRun, _: Fault) -> None:
    with run.operator() as client:
        client.pause("a test")
        client.resume("a test")


def _ask_for_a_slave(run: FaultRun, _: Fault) -> None:
    """One that never comes, so that the run stays as it is; and take it back."""
    with run.operator() as client:
        client.reshard(["s2"], [], "a test")
        client.take_back_reshard()


def _restart_master(run: FaultRun, _: Fault) -> None:
    run.will_end("master")
    run.kill("master")


def _restart_slave(run: FaultRun, fault: Fault) -> None:
    name = fault.process if fault.process in SLAVES else "s0"
    run.will_end(name)
    if name == fault.process:
        run.at_birth(name, fault.spec)
    run.kill(name)


OF_METHOD: Mapping[str, Trigger] = {
    "Join": _evict,
    "Leave": _end_cluster,
    "Status": _wish(lambda client: client.status()),
    "Watch": _wish(_watch),
    "Pause": _wish(lambda client: client.pause("a test")),
    "Resume": _pause_and_resume,
    "Evict": _evict,
    "Drain": _drain,
    "Reshard": _ask_for_a_slave,
    "Extend": _wish(lambda client: client.extend(0, True, "a test")),
}
OF_POINT: Mapping[str, Trigger] = {
    "slave.link.before_attach": _restart_master,
    "slave.PROMISED.configure": _restart_slave,
    "slave.CONFIGURING.ready": _restart_slave,
    "slave.READY.lost": _restart_slave,
    "slave_link.DETACHED.linked": _restart_master,
    "slave_link.GREETING.welcome": _restart_master,
    "slave_link.PROMISING.promise_saved": _restart_master,
    "slave_link.ATTACHED.unlinked": _restart_master,
    "slave_shard.EMPTY.configure": _restart_slave,
    "slave_shard.LOADING.done": _restart_slave,
    "session.JOINING.joined": _evict,
    "session.LEAVING.left": _end_cluster,
}


def trigger_of(point: str) -> Trigger | None:
    """None: a run that trains passes there by itself."""
    return OF_POINT.get(point) or OF_METHOD.get(point.partition("rpc.")[2].partition("_")[2])


def planned(points: list[str], harm: str) -> Iterator[Fault]:
    of_role = {"master": ("master",), "slave": SLAVES, "worker": CLUSTERS}
    turns = {role: itertools.cycle(names) for role, names in of_role.items()}
    for point in points:
        yield Fault(next(turns[role_of(point)]), point, harm)


def in_a_run() -> list[str]:
    """Names of the registry that a run passes while it goes on."""
    others = {*ELSEWHERE, *ENDS_THE_RUN, *itertools.chain(*AT_BIRTH.values())}
    return [name for name in all_names() if name not in others]


def births(harm: str) -> dict[str, list[str]]:
    """What the first lives of each process are told: one fault a life if it ends them, else all in the first life. (A
    slave whose ring cannot be made says so, and tries again in the same life.)"""
    plan = {}
    for name, points in AT_BIRTH.items():
        specs = [Fault(name, point, harm).spec for point in points]
        one_each = harm == "crash" or (harm == "error" and name != "s1")
        plan[name] = specs if one_each else ["; ".join(specs)]
    return plan


def endured(run: FaultRun, fault: Fault) -> None:
    """Arm, bring the run there, wait until it is over and the run has healed."""
    incarnations = run.incarnations()
    run.stopped_s = (STOPPED_S, BRIEFLY_S)[len(fault.point) % 2]
    run.may_die.add(fault.process)
    run.mark(fault.process)
    run.arm(fault.process, fault.spec)
    woken = run.woken[fault.process]
    pid = _bring_there(run, fault)
    match fault.harm:
        case "crash":
            run.until(lambda: run.children[fault.process].pid != pid, f"{fault}: it did not die")
        case "stop":
            run.until(lambda: run.woken[fault.process] > woken, f"{fault}: it did not stop")
        case _:
            over_s = run.fired_at_s(fault.process) + (
                SLEEP_S if fault.harm == "sleep" else SETTLE_S[role_of(fault.point)]
            )
            run.until(lambda: time.time() >= over_s or run.children[fault.process].pid != pid, "time stands still")
            if _leaves(run, fault):  # for up to leave_wait_s: it would end during another harm
                run.until(lambda: run.children[fault.process].pid != pid, f"{fault}: it left and did not end")
    away: Mapping[str, Incarnation | None] = {}
    if run.children[fault.process].pid != pid and fault.process in CLUSTERS:
        away = {fault.process: incarnations.get(fault.process)}
    run.recovered(away, lambda: _undone(run, fault))
    run.healed(fault.process)


def _leaves(run: FaultRun, fault: Fault) -> bool:
    """Whether a cluster leaves the run because of an error here. It says so at once, and then may wait for a push."""
    return any("leaving" in line and f"failpoint {fault.point}" in line for line in run.log(fault.process).splitlines())


def _bring_there(run: FaultRun, fault: Fault) -> int:
    """Wait until it fired; the process in which it did."""
    trigger = trigger_of(fault.point)
    next_s = time.monotonic()
    generation = run.lives[fault.process]

    def fires() -> bool:
        nonlocal next_s, generation
        if _fired(run, fault):
            return True
        if trigger is not None and time.monotonic() >= next_s:
            tried(lambda: trigger(run, fault))
            next_s = time.monotonic() + AGAIN_S
        if run.lives[fault.process] > generation and not _fired(run, fault):  # it ended on the way: arm its next life
            generation = run.lives[fault.process]
            run.arm(fault.process, fault.spec)
        return False

    run.until(fires, f"{fault} fires")
    return _fired(run, fault)[-1]


def _fired(run: FaultRun, fault: Fault) -> list[int]:
    lines = [line.split() for line in run.fired(fault.process)]
    return [int(pid) for point, harm, pid in lines if (point, harm) == (fault.point, fault.harm)]


def tried(wish: Callable[[], None]) -> bool:
    try:
        wish()
    except (Refused, RetryLater):
        return False
    except Exception as error:  # a stream of gRPC's that breaks
        if type(error).__module__.partition(".")[0] != "grpc":
            raise
        return False
    return True


def _undone(run: FaultRun, fault: Fault) -> bool:
    """A run that was paused on the way goes on again; a cluster that may have been drained is drained, and returns."""
    if fault.point.endswith("_Drain"):
        if _cluster_of(fault) not in run.ending:
            tried(lambda: _drain(run, fault))
        return _cluster_of(fault) in run.ending
    if fault.point.endswith("_Reshard"):
        return _taken_back(run)
    if not fault.point.endswith(("_Pause", "_Resume")):
        return True
    status = run.status()
    if status is not None and status.paused:
        tried(lambda: _wish(lambda client: client.resume("a test"))(run, fault))
    return status is not None and not status.paused


def _taken_back(run: FaultRun) -> bool:
    """Whether no slave is waited for any more; the master refuses to take back what was not asked for."""
    try:
        with run.operator() as client:
            client.take_back_reshard()
    except Refused:
        return True
    except RetryLater:
        return False
    return True
