"""Starts real processes in a tenth of a second: forks them from one that has imported everything.

`ForkServer` starts that one (python -m support.fork_server) and asks it for children; each has its own memory, files,
threads and pid, and dies alone. A child takes orders for its failpoints on a socket of its own while it runs, so that
one process can see many faults. Linux only (abstract socket names).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.repository import ROOT
from support.waiting import NO_LIMIT_S

ARM_S = 20.0
MAX_WORDS = 1 << 16


class ForkedProcess:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def ended(self, code: int) -> None:
        self.returncode = code
        self._ended.set()


class ForkServer:
    def __init__(self, *, torch: bool = False) -> None:
        """torch: its children may be ranks of support.parallel_process."""
        self._words = ["torch"] if torch else []
        self._key = secrets.token_hex(8)
        self._children: dict[int, ForkedProcess] = {}
        self._started: list[int] = []
        self._changed = threading.Condition()
        self._ordering = threading.Lock()
        self._control: socket.socket | None = None

    def __enter__(self) -> ForkServer:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("DIPS_")}
        environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "tests"), environment.get("PYTHONPATH", "")))
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "support.fork_server", self._key, *self._words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        assert self._parent.stdout is not None
        assert self._parent.stdout.readline() == "ready\n", "the fork server did not start: see its error above"
        self._thread = threading.Thread(target=self._listen, name="fork server", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._parent.stdin is not None
        for child in list(self._children.values()):
            child.kill()
        self._parent.stdin.close()
        self._parent.wait(30)
        self._thread.join(30)
        assert self._parent.stdout is not None
        self._parent.stdout.close()
        if self._control is not None:
            self._control.close()

    def start(self, name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> ForkedProcess:
        """arguments: of `dips`, or ["cluster", ...] for a cluster of support.cluster_process, ["rank", ...]
        for one of support.parallel_process."""
        assert self._parent.stdin is not None
        order = {"name": name, "arguments": list(arguments), "log": str(log), "environment": dict(environment)}
        with self._ordering, self._changed:
            self._parent.stdin.write(json.dumps(order) + "\n")
            self._parent.stdin.flush()
            assert self._changed.wait_for(lambda: self._started, NO_LIMIT_S), "the fork server does not answer"
            return self._children[self._started.pop()]

    def arm(self, child: ForkedProcess, spec: str, log: Path) -> str:
        with self._ordering:
            return self._arm(child, spec, log)

    def _arm(self, child: ForkedProcess, spec: str, log: Path) -> str:
        if self._control is None:
            self._control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._control.bind(f"\0dips-{self._key}")
        self._control.settimeout(ARM_S)
        words = json.dumps({"spec": spec, "log": str(log)}).encode()
        try:
            self._control.sendto(words, _control_address(self._key, child.pid))
            answer, _ = self._control.recvfrom(MAX_WORDS)
        except OSError as error:  # it died, or is not so far yet
            return f"process {child.pid} does not listen: {error}"
        return answer.decode()

    def _listen(self) -> None:
        assert self._parent.stdout is not None
        for line in self._parent.stdout:
            word, pid, code, *_ = (*line.split(), "0")
            with self._changed:
                if word == "started":
                    self._children[int(pid)] = ForkedProcess(int(pid))
                    self._started.append(int(pid))
                else:
                    self._children[int(pid)].ended(int(code))
                self._changed.notify_all()


def _control_address(key: str, pid: int) -> str:
    return f"\0dips-{key}-{pid}"


def main(key: str, *imported: str) -> None:
    """Fork a child for each line on stdin, and report starts and ends on stdout. Ends with its input."""
    _import_everything()
    if "torch" in imported:
        import support.parallel_process

        del support
    wake_reader, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wake_reader, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    _say("ready")
    chosen = selectors.DefaultSelector()
    chosen.register(sys.stdin.fileno(), selectors.EVENT_READ)
    chosen.register(wake_reader, selectors.EVENT_READ)
    pids: set[int] = set()
    unread = b""
    while True:
        ready = {found.fd for found, _ in chosen.select()}
        if wake_reader in ready:
            os.read(wake_reader, 4096)
            _collect(pids)
        if sys.stdin.fileno() in ready:
            words = os.read(sys.stdin.fileno(), MAX_WORDS)
            if not words:
                break
            *lines, unread = (unread + words).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    _run_child(key, json.loads(line))
                pids.add(pid)
                _say(f"started {pid}")
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _collect(pids: set[int]) -> None:
    for pid in list(pids):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            pids.discard(pid)
            _say(f"ended {pid} {os.waitstatus_to_exitcode(status)}")


def _say(line: str) -> None:
    print(line, flush=True)


def _import_everything() -> None:
    """What children need, so that they have it from the start: imports only, no thread, no socket, no channel."""
    import support.cluster_process

    import dips.cli.main
    import dips.master.process
    import dips.slave.process
    from dips.core.math import landing_numba, outer_numba, wire_numba

    del support, dips
    outer_numba.warm_up()
    wire_numba.warm_up()
    landing_numba.warm_up()


def _run_child(key: str, order: dict[str, Any]) -> None:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for number in (1, 2):
            os.dup2(log, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(order["environment"])
        threading.Thread(target=_take_orders, args=(key,), name="failpoints", daemon=True).start()
        code = _work(order["arguments"])
    except SystemExit as ending:
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
        code = ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _work(arguments: list[str]) -> int:
    if arguments[0] == "cluster":
        from support.cluster_process import main as cluster

        return cluster(arguments[1:])
    if arguments[0] == "rank":
        from support.parallel_process import main as rank

        return rank(arguments[1:])
    from dips.cli.main import main as command

    sys.argv = ["dips", *arguments]
    command()
    return 0


def _take_orders(key: str) -> None:
    from dips.core.errors import DipsError
    from dips.core.observe.failpoints import clear, set_failpoints

    control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    control.bind(_control_address(key, os.getpid()))
    while True:
        words, sender = control.recvfrom(MAX_WORDS)
        order = json.loads(words)
        answer = ""
        try:
            if order["spec"]:
                set_failpoints(order["spec"], log_path=order["log"])
            else:
                clear()
        except DipsError as error:
            answer = str(error)
        with contextlib.suppress(OSError):
            control.sendto(answer.encode(), sender)


if __name__ == "__main__":
    main(*sys.argv[1:])
