"""A real run under attack: one master, one slave, one cluster that trains, and peers that mean harm.

After every attack the run answers, its memory is within its budget, what was wrong was counted, and training goes on.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import numpy as np
import zmq
from support import hostile
from support.whole_run import LAYOUT, NumpyCluster, WholeRun

from dips.core.errors import Refused, RetryLater
from dips.core.ids import Incarnation
from dips.core.messages import Caller, HeartbeatRequest, Hello, JoinRequest
from dips.core.net.codec_protobuf import encode
from dips.core.net.grpc_calls import refused_from
from dips.core.net.security import INSECURE
from dips.core.observe.tape import read_tape
from dips.core.protocol import PROTOCOL_MIN, PROTOCOL_VERSION
from dips.local.operator_client import OperatorClient
from dips.master.directory import TAPE_NAME
from fuzz.wire import headers, sealed

CALLS = {
    "Clusters": (
        *("Join", "BeginPush", "FinishPush", "AwaitVerdict", "BeginPull", "FinishPull", "LeaseData", "ReturnData"),
        "Leave",
    ),
    "Operator": ("Status", "Pause", "Resume", "Evict", "Drain", "Extend"),
}
STREAMS = {"Clusters": ("Heartbeat",), "Slaves": ("Attach",)}

ANSWER_S = 10.0
"""Longer than a status may take here; how long it takes is benchmarks/bench_storm.py's affair."""

MASTER_GROWTH_BYTES = 512 << 20
"""Of the master's memory over all attacks: its limits are 64 MiB for a message and 1536 calls at once."""

CALL_S = 5.0
CHUNK_BYTES = 4096


@dataclass
class Scene:
    """The run, and what is counted. address: of the master; endpoint: of the slave's data port."""

    run: WholeRun
    cluster: NumpyCluster
    rng: random.Random
    endpoint: str = ""
    inputs: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)

    def tried(self, attack: str, answer: str, n: int = 1) -> None:
        self.inputs[attack] += n
        self.answers[f"{attack}: {answer}"] += n

    def call(self, channel: grpc.Channel, service: str, method: str, data: bytes) -> str:
        """What one unary call with these bytes is answered."""
        ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/dips.v1.{service}/{method}")
        try:
            ask(data, timeout=CALL_S)
        except grpc.RpcError as error:
            return _refusal(error)
        return "answered"

    def stream(self, channel: grpc.Channel, service: str, method: str, messages: Sequence[bytes]) -> str:
        ask: grpc.StreamStreamMultiCallable[bytes, bytes]
        ask = channel.stream_stream(f"/dips.v1.{service}/{method}")
        try:
            for _ in ask(iter(messages), timeout=CALL_S):
                pass
        except grpc.RpcError as error:
            return _refusal(error)
        return "answered"


def _refusal(error: grpc.RpcError) -> str:
    meaning = refused_from(error)
    return "unanswered" if isinstance(meaning, RetryLater) else f"refused {meaning.code.name}"


@contextlib.contextmanager
def _channel(scene: Scene) -> Iterator[grpc.Channel]:
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(scene.run.address, options=options) as channel:
        yield channel


# ---- at the master ----


def senseless_calls(scene: Scene) -> None:
    """Random and nearly right bytes for every method."""
    right = encode(JoinRequest(_caller(scene, None), _hello(), LAYOUT, LAYOUT.layout_hash, scene.run.plan))
    with _channel(scene) as channel:
        for _ in range(40):
            data = bytearray(scene.rng.choice((right, scene.rng.randbytes(scene.rng.randrange(300)))))
            if data:
                data[scene.rng.randrange(len(data))] ^= 1 << scene.rng.randrange(8)
            for service, methods in CALLS.items():
                method = scene.rng.choice(methods)
                scene.tried("senseless calls", scene.call(channel, service, method, bytes(data)))
            service, (method,) = scene.rng.choice(list(STREAMS.items()))
            scene.tried("senseless calls", scene.stream(channel, service, method, [bytes(data)]))
    # Without keys anybody may pause a run, and one of these calls may have said so rightly.
    with OperatorClient(scene.run.address, security=INSECURE) as operator:
        operator.resume("it was paused by chance")


def stolen_incarnation(scene: Scene) -> None:
    """Beats in the name of incarnations and epochs that were never given, or not to this cluster."""
    with _channel(scene) as channel:
        for number in range(20):
            incarnation = Incarnation(scene.rng.randrange(4), scene.rng.choice((1, 2, 3, 2**63, 2**64 - 1)))
            caller = replace(_caller(scene, incarnation), name=scene.rng.choice(("ghost", "a", "s0", "")))
            if caller.name == "a" and _may_be_given(incarnation, scene.cluster.driver.incarnation):
                continue
            answer = scene.stream(channel, "Clusters", "Heartbeat", [encode(HeartbeatRequest(caller, steps_per_s=1.0))])
            if answer == "answered":
                raise AssertionError(f"a beat of {caller.name!r} as {incarnation} was taken (number {number})")
            scene.tried("stolen incarnation", answer)


def _may_be_given(incarnation: Incarnation, known: Incarnation | None) -> bool:
    """Whether the honest cluster may have it by now: it knows of the next one later than the master."""
    return incarnation.n < 2**63 and (known is None or (incarnation.epoch == known.epoch and incarnation >= known))


def replayed_join(scene: Scene) -> None:
    """The honest cluster's Join, letter by letter, in a row: it must find its way back each time."""
    steps = scene.cluster.steps_made
    caller = Caller("test", 0, "a", None, "attack")
    drawn = scene.cluster.driver._session.config.process_id  # of another process it would be refused
    join = JoinRequest(caller, _hello(), LAYOUT, LAYOUT.layout_hash, scene.run.plan, process_id=drawn)
    with _channel(scene) as channel:
        for _ in range(3):
            scene.tried("replayed join", scene.call(channel, "Clusters", "Join", encode(join)))
    _wait(lambda: scene.cluster.steps_made > steps, "the cluster did not train on after its Join was replayed")


def garbage_at_the_master(scene: Scene) -> None:
    """Raw bytes, half an HTTP/2 preface, frames without end, and silence, on 200 connections."""
    payloads = [
        *(b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff", b"", hostile.HTTP2_PREFACE[:9]),
        *(hostile.HTTP2_PREFACE + scene.rng.randbytes(400) for _ in range(4)),
        hostile.HTTP2_PREFACE + b"\x00\xff\xff\x01\x05\x00\x00\x00\x01" + bytes(4000),
    ]
    peers = hostile.garbage_connections(scene.run.address, (scene.rng.choice(payloads) for _ in range(200)))
    scene.tried("garbage at the master", "connected", len(peers))
    _answers(scene)
    for peer in peers:
        peer.close()


def slow_loris(scene: Scene) -> None:
    """Greetings byte by byte, on both ports, while all others are served."""
    greetings = {scene.run.address: hostile.HTTP2_PREFACE, scene.endpoint: hostile.GREETING}
    peers = [(hostile.connect(where), words) for where, words in greetings.items() for _ in range(20)]
    for n in range(20):
        for peer, said in peers:
            with contextlib.suppress(OSError):
                peer.send(said[n : n + 1])
        _answers(scene)
    scene.tried("slow loris", "connected", len(peers))
    for peer, _ in peers:
        peer.close()


# ---- at the slave ----


def spoofed_identity(scene: Scene) -> None:
    """A second connection under the routing id of the first must not get its answers."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as honest, context.socket(zmq.DEALER) as thief:
        for socket in (honest, thief):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.ROUTING_ID, b"the-honest-one")
            socket.connect(scene.endpoint)
            socket.send(sealed(headers()[1]))
            if socket is honest and not socket.poll(int(1000 * CALL_S)):
                raise AssertionError("the first of two connections with one routing id was not answered")
        honest.recv()
        for _ in range(5):
            honest.send(sealed(headers()[1]))
            if not honest.poll(int(1000 * CALL_S)):
                raise AssertionError("the thief of a routing id took its owner's place")
            honest.recv()
        if thief.poll(100):
            raise AssertionError("the thief of a routing id was answered")
        scene.tried("spoofed identity", "the owner alone is answered")


def oversized_frame(scene: Scene) -> None:
    """A frame that says it has 2^62 bytes, and one of 3 MiB: the connection ends before anything is allocated."""
    for flags, size in ((hostile.LONG, 1 << 62), (hostile.LONG, 3 << 20), (hostile.LONG | hostile.MORE, 1 << 40)):
        with hostile.dealer(scene.endpoint) as peer:
            peer.sendall(bytes([flags]) + size.to_bytes(8, "big"))
            if not hostile.hung_up(peer):
                raise AssertionError(f"a frame of {size} bytes was waited for")
            scene.tried("oversized frame", "connection ended")


def garbage_at_the_slave(scene: Scene) -> None:
    """Raw bytes and half greetings on 200 connections."""
    payloads = [b"", b"GET / HTTP/1.1\r\n\r\n", hostile.GREETING[:11], hostile.GREETING, scene.rng.randbytes(300)]
    payloads += [hostile.GREETING + hostile.frame(scene.rng.randbytes(99), hostile.COMMAND)]
    peers = hostile.garbage_connections(scene.endpoint, (scene.rng.choice(payloads) for _ in range(200)))
    scene.tried("garbage at the slave", "connected", len(peers))
    for peer in peers:
        peer.close()


ATTACKS: tuple[Callable[[Scene], None], ...] = (
    *(senseless_calls, stolen_incarnation, replayed_join, garbage_at_the_master),
    *(slow_loris, spoofed_identity, oversized_frame, garbage_at_the_slave),
)


# ---- the run ----


def attack_for(seconds: float, seed: int) -> list[str]:
    """All attacks, again and again until the time is over. Prints a table; returns the violations."""
    with TemporaryDirectory(prefix="dips-live-") as folder:
        found, scene = attack(Path(folder), seed, seconds, ATTACKS)
    print("real processes under attack", flush=True)
    for name, n in sorted(scene.inputs.items()):
        what = {key.split(": ")[1]: count for key, count in scene.answers.items() if key.startswith(f"{name}: ")}
        told = ", ".join(f"{key} {count}" for key, count in sorted(what.items(), key=lambda item: -item[1])[:5])
        print(f"  {name:<24} {n:>6}  {told}", flush=True)
    return found


def attack(
    folder: Path, seed: int, seconds: float, attacks: Sequence[Callable[[Scene], None]]
) -> tuple[list[str], Scene]:
    """At least once each."""
    run = WholeRun(folder, n_slaves=1, tk_max=10**9, chunk_bytes=CHUNK_BYTES, heartbeat_s=1.0, evict_after_beats=20)
    run.slave = {"memory_bytes": 64 << 20}
    with run:
        cluster = run.cluster("a", 1, step_s=0.02)
        run.wait_for_version(1)
        scene = Scene(run, cluster, random.Random(seed), run.status().slaves[0].data_endpoint)
        found = list(_rounds(scene, seconds, attacks))
        if not found:
            found = _afterwards(scene)
        cluster.driver.request_stop()
        cluster.join()
    return found, scene


def _rounds(scene: Scene, seconds: float, attacks: Sequence[Callable[[Scene], None]]) -> Iterator[str]:
    end_s = time.monotonic() + seconds
    before = _counts(scene)
    while True:
        for each in attacks:
            version = scene.run.version()
            # Training goes on towards something new: a cluster that has arrived pushes nothing that could be merged.
            model = scene.cluster.model
            model.target = (
                np.random.default_rng(scene.rng.randrange(1 << 30)).normal(size=len(model.theta)).astype("f4")
            )
            try:
                each(scene)
                _unharmed(scene, version)
            except (AssertionError, Refused, RetryLater, OSError, zmq.ZMQError) as error:
                yield f"{each.__name__}: {type(error).__name__}: {error}"
                return
        if time.monotonic() >= end_s:
            break
    if not _counts(scene) - before:
        yield "nothing that was refused was counted"


def _unharmed(scene: Scene, version: int) -> None:
    """All processes live, the run answers, and publishes again."""
    for name, process in scene.run.processes.items():
        if process.poll() is not None:
            raise AssertionError(f"{name} ended with {process.returncode}: {scene.run.log(name)}")
    _answers(scene)
    _wait(lambda: scene.run.version() > version, "nothing was published after it", lambda: _state(scene))


def _answers(scene: Scene) -> None:
    began_s = time.monotonic()
    scene.run.status()
    if time.monotonic() - began_s > ANSWER_S:
        raise AssertionError(f"status took {time.monotonic() - began_s:.1f} s")


def _counts(scene: Scene) -> Counter[str]:
    """Refusals as the run itself counts them."""
    slave = scene.run.status().slaves[0]
    tape = scene.run.directory / "master" / TAPE_NAME
    refused = sum(line.get("count", 1) for line in read_tape(tape) if line["kind"] == "refused")
    return Counter(chunks=slave.refused_chunks, connections=slave.refused_connections, calls=refused)


def _afterwards(scene: Scene) -> list[str]:
    counts = _counts(scene)
    print(f"counted by the run: {dict(counts)}", flush=True)
    grown = hostile.own_memory_bytes(scene.run.processes["master"].pid)
    if grown > MASTER_GROWTH_BYTES:
        return [f"the master has {grown >> 20} MiB after the attacks"]
    return []


def _state(scene: Scene) -> str:
    status, driver = scene.run.status(), scene.cluster.driver
    words = f"waiting for {status.waiting_for!r}, phase {status.phase}, cluster {driver.phase}: {driver.exit_reason!r}"
    return f"{words}, error {scene.cluster.error!r}; slave: {scene.run.log('s0')[-600:]}"


def _wait(happened: Callable[[], bool], what: str, why: Callable[[], str] = lambda: "") -> None:
    end_s = time.monotonic() + 60
    while not happened():
        if time.monotonic() > end_s:
            raise AssertionError(f"{what}; {why()}")
        time.sleep(0.05)


def _caller(scene: Scene, incarnation: Incarnation | None) -> Caller:
    return Caller("test", 1, "ghost", incarnation, "attack")


def _hello() -> Hello:
    return Hello(PROTOCOL_MIN, PROTOCOL_VERSION)
