"""Reads published versions from outside of a cluster, once or as they come: for export, evaluation and followers.

A reader holds a pin while it fetches, and renews it while bytes arrive, so that rounds go on meanwhile and it never
blocks one. Returns only a whole version in which every share has the digest of its COMMIT record (I3). Who holds an
earlier version gets differences to it, where the run publishes them and the slaves still have them.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import zmq

from dips.core.clock import Clock, SystemClock
from dips.core.errors import RefusalCode, Refused, RemoteProtocolError, RetryLater
from dips.core.ids import Version
from dips.core.layout import PublishedModel
from dips.core.messages import (
    BeginPullReply,
    BeginPullRequest,
    Busy,
    Caller,
    FinishPullRequest,
    PullGrant,
    Settings,
    StatusReply,
    StatusRequest,
)
from dips.core.net.addresses import MasterAddresses, check_slaves_reachable
from dips.core.net.carriers import Common, carry_pull
from dips.core.net.security import Identity, Role, Security
from dips.core.net.tls_probe import check_let_in
from dips.core.net.transfer import LEAST_BYTES_PER_S, SlaveProgress, TransferSettings
from dips.core.net.zmq_sockets import CurvePair, pair_for
from dips.core.observe.logs import ChangeLogger
from dips.core.observe.tape import new_cause
from dips.core.units import format_bytes
from dips.core.wire import encoded_block_bytes
from dips.protos import operator_pb2_grpc
from dips.worker.control import MasterStubs
from dips.worker.state.pulling import check_placement

CALL_DEADLINE_S = 10.0
LONGEST_PAUSE_S = 1.0
WINDOW_CHUNKS = 16

OLDER_PIN_S = 60.0
"""How long a pin lasts, with the defaults, at a master of an older release, which does not say it."""

RENEWING_BYTES_PER_S = LEAST_BYTES_PER_S / 2
"""Half the rate of the slowest link that is supported: chunks count when they are whole, so that the rate varies."""

_logger = logging.getLogger("dips.worker.reader")


class PinRenewal:
    """Says when to renew a reader's pin: three times in the time that it lasts, while bytes arrive.

    A pinned version takes memory on every slave, so a reader that gets a trickle must lose its pin, as a silent one
    does. Pure: time is an argument.
    """

    def __init__(self, pin_s: float, now_s: float) -> None:
        self.every_s = (pin_s if pin_s > 0 else OLDER_PIN_S) / 3
        self._since_s = now_s
        self._carried_bytes = 0

    def due(self, carried_bytes: int, now_s: float) -> bool:
        """Whether to renew it now; true once for each renewal. carried_bytes: since the beginning of the transfer."""
        past_s = now_s - self._since_s
        if past_s < self.every_s or carried_bytes - self._carried_bytes < RENEWING_BYTES_PER_S * past_s:
            return False
        self._since_s, self._carried_bytes = now_s, carried_bytes
        return True


def fetch_version(
    master: str | MasterAddresses,
    run_id: str | None,
    name: str,
    security: Security,
    version: Version | None = None,
    at_least: Version | None = None,
    deadline_s: float = 60.0,
    clock: Clock | None = None,
    base: PublishedModel | None = None,
    cancelled: threading.Event | None = None,
) -> PublishedModel:
    """Fetch exactly `version`, else the newest one that is published (and at least `at_least`).

    master: HOST:PORT, or several with commas between them. base: a version that is here, and is not changed meanwhile:
    differences to it are fetched, where there are some (decoding them takes numba). Waits up to deadline_s; a transfer
    that is under way then goes on while bytes arrive, until `cancelled`. Raises Refused (VERSION_GONE names what is
    kept; RUN_ID), RetryLater when the time is over or it was cancelled (with the last reason),
    RemoteProtocolError for shares that contradict their digest, and ConfigError for an address that cannot be used, or
    slaves that only their own machine reaches.
    """
    masters = MasterAddresses(master) if isinstance(master, str) else master
    check_let_in(masters.now, security)
    with contextlib.closing(MasterStubs(masters, security)) as stubs:
        curve = pair_for(security)
        base = base if find_spec("numba") is not None else None
        reader = _Reader(
            stubs, masters, run_id or "", name, deadline_s, clock or SystemClock(), curve, base,
            cancelled or threading.Event(),
        )  # fmt: skip
        return reader.fetch(version, at_least)


class _Reader:
    def __init__(
        self,
        stubs: MasterStubs,
        masters: MasterAddresses,
        run_id: str,
        name: str,
        deadline_s: float,
        clock: Clock,
        curve: CurvePair | None,
        base: PublishedModel | None,
        cancelled: threading.Event,
    ) -> None:
        self._curve = curve
        self._base = base
        self._cancelled = cancelled
        self._stubs = stubs
        self._masters = masters
        self._run_id = run_id
        self._name = name
        self._clock = clock
        self._until_s = clock.monotonic_s() + deadline_s
        self._cause = new_cause()
        self._pin_id = 0

    def fetch(self, version: Version | None, at_least: Version | None) -> PublishedModel:
        while True:
            grant = self._granted(self._request(version or at_least, version is not None))
            self._pin_id = grant.pin_id
            try:
                fetched = self._transfer(grant)
            finally:
                self._release()
            if isinstance(fetched, PublishedModel):
                return fetched
            self._pause(0.5, fetched)

    def _granted(self, request: BeginPullRequest) -> PullGrant:
        while True:
            try:
                reply = self._stubs.call(request, CALL_DEADLINE_S)
            except RetryLater as error:
                self._pause(error.retry_after_s, str(error))
                continue
            assert isinstance(reply, BeginPullReply), "the stub's type"
            if not isinstance(reply.answer, Busy):
                return reply.answer
            self._pause(reply.answer.retry_after_s, reply.answer.sentence)

    def _transfer(self, grant: PullGrant) -> PublishedModel | str:
        """The model, or why it could not be fetched this time."""
        layout = grant.layout
        if layout is None:
            raise RemoteProtocolError("the master granted a pull without the layout: both sides need one release")
        check_placement(grant.placement, len(layout.blocks))
        base = self._base if grant.wire.is_difference else None
        if grant.wire.is_difference and (base is None or base.version != grant.base):
            raise RemoteProtocolError(f"the master grants differences to {grant.base}, which was not asked for")
        if base is not None and (layout, grant.run_id) != (base.layout, base.run_id):
            self._base = None
            return f"version {base.version} here is of another run or another model"
        check_slaves_reachable(self._masters.now, grant.placement.slaves)
        began_s = self._clock.monotonic_s()
        settings = TransferSettings(grant.chunk_bytes, WINDOW_CHUNKS)
        # Near the deadline less patience is left for slaves that say nothing, but enough for a chunk over a slow link.
        stall_s = max(settings.first_silence_s, min(settings.stall_s, self._until_s - began_s))
        settings = replace(settings, stall_s=stall_s)
        flat = np.zeros(layout.n_elems, np.float32)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        renewal = PinRenewal(grant.pin_s, began_s)
        # A thread of its own: while the master does not answer, the transfer goes on.
        with ThreadPoolExecutor(1, "dips-reader-pin") as renewing:

            def tell(moved: Mapping[str, SlaveProgress], now_s: float) -> None:
                if renewal.due(sum(part.carried_bytes for part in moved.values()), now_s):
                    renewing.submit(self._renew, grant, min(CALL_DEADLINE_S, renewal.every_s))

            common = Common(grant.run_id, grant.epoch, self._cause, layout, settings, curve=self._curve, tell=tell)
            theta = None if base is None else base.flat
            try:
                transfer = carry_pull(context, common, flat, grant, self._clock, self._cancelled, base=theta)
            finally:
                context.destroy(linger=0)
        if transfer.done:
            n_bytes = sum(encoded_block_bytes(grant.wire, each.n_elems, grant.chunk_bytes) for each in layout.blocks)
            n_bytes *= grant.version.v - base.version.v if base is not None else 1
            what = "parameters" if base is None else f"differences to version {base.version} ({grant.wire.name})"
            _logger.info("version %s: %s of %s", grant.version, format_bytes(n_bytes), what)
            return PublishedModel(grant.run_id, grant.version, grant.tokens, layout, flat)
        if base is not None and (transfer.base_gone or transfer.corrupt):
            self._base = None
            _logger.info("version %s is fetched whole: %s", grant.version, transfer.failure)
        elif transfer.corrupt:
            raise RemoteProtocolError(f"version {grant.version} cannot be read: {transfer.failure}")
        return transfer.failure

    def _renew(self, grant: PullGrant, deadline_s: float) -> None:
        """Ask for the same version again. For a master of an older release that is a new pull, which takes the place of
        this one and has another pin."""
        try:
            reply = self._stubs.call(self._request(grant.version, True, self._pin_id), deadline_s)
        except (Refused, RetryLater) as error:
            # If the pin ends, the transfer fails and says why.
            _logger.debug("the pin on version %s was not renewed: %s", grant.version, error)
            return
        assert isinstance(reply, BeginPullReply), "the stub's type"
        if isinstance(reply.answer, PullGrant):
            self._pin_id = reply.answer.pin_id

    def _release(self) -> None:
        try:
            self._stubs.call(FinishPullRequest(self._caller(), self._pin_id, True), CALL_DEADLINE_S)
        except RetryLater:
            pass  # the pin expires by itself

    def _request(self, version: Version | None, exact: bool, pin_id: int = 0) -> BeginPullRequest:
        key = b"" if self._curve is None else self._curve.public
        base = self._base.version if self._base is not None else None
        return BeginPullRequest(self._caller(), True, version, exact, key, base, pin_id)

    def _caller(self) -> Caller:
        return Caller(self._run_id, 0, self._name, None, self._cause)

    def _pause(self, wanted_s: float, why: str) -> None:
        """Wait before the next try. Raises RetryLater when the time is over."""
        left_s = self._until_s - self._clock.monotonic_s()
        if self._cancelled.is_set():
            raise RetryLater("the pull was ended here")
        if left_s <= 0:
            raise RetryLater(f"no version could be read in time: {why}")
        time.sleep(min(left_s, max(0.05, min(wanted_s, LONGEST_PAUSE_S))))


# ---- followers -------------------------------------------------------------------------------------------------------
#
# Follows a run and uses its versions, until the run has stopped: evaluates them, or puts them where they are wanted.
#
# Uses every version as long as it can keep up, or the newest alone; the last one always. A follower must never delay a
# run: it only reads, and skips a version that is gone. The servers of a run that has ended answer for a while only,
# which may be shorter than a use: so it also asks during one, and gives it up for the last version.


POLL_S = 0.5

FETCH_DEADLINE_S = 60.0


class RunWatch:
    """The status of one run ("": any that its master serves), from the address where that answers."""

    def __init__(self, masters: MasterAddresses, run_id: str, deadline_s: float, security: Security) -> None:
        """Raises ConfigError for an address that cannot be used."""
        self._masters, self._run_id, self._deadline_s = masters, run_id, deadline_s
        self._stubs = MasterStubs(masters, security, service=operator_pb2_grpc.OperatorStub)
        self._epoch = 0

    def status(self) -> StatusReply:
        """The run's status. Raises Refused, or RetryLater when no answer comes in time, or that of a master which
        another one has replaced."""
        master = self._masters.now
        status: StatusReply = self._stubs.call(StatusRequest(self._run_id), self._deadline_s)
        if status.epoch < self._epoch and self._masters.several:
            why = f"the one there is in epoch {status.epoch}, and the run was in epoch {self._epoch}"
            self._masters.leave(master, why)
            raise RetryLater(self._masters.why_none(why))
        self._epoch = status.epoch
        return status

    def __enter__(self) -> RunWatch:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stubs.close()


class _Superseded(Exception):
    """The run has ended with a later version than the one that is being used."""


def next_version(status: StatusReply, last: Version | None) -> Version | None:
    """The next version after `last` to ask for; None: nothing new."""
    published = status.published
    if published is None or published == last:
        return None
    if not status.stopped and last is not None and published.timeline == last.timeline and published.v > last.v:
        return last.next()
    return published


class Follower:
    """Asks, fetches and uses; `run` ends when the run has stopped and its last version was used."""

    def __init__(
        self,
        status: Callable[[], StatusReply],
        fetch: Callable[[Version | None], PublishedModel],
        use: Callable[[PublishedModel, Callable[[], None]], None],
        patience_s: float,
        clock: Clock | None = None,
        *,
        last: Version | None = None,
        newest_only: bool = False,
        once: bool = False,
    ) -> None:
        """fetch(version), None for the newest. use(fetched, now_and_then): calls now_and_then() often where it takes
        long, and passes on what that raises. patience_s: how long the master may be away before its first answer, and
        once its run is stopping: then it may have ended. last: the version that was used before. once: end after one
        use, or when `last` is the newest.
        """
        self._status = status
        self._fetch = fetch
        self._use = use
        self._patience_s = patience_s
        self._clock: Clock = clock or SystemClock()
        self._last = last
        self._newest_only = newest_only
        self._once = once
        self._end: StatusReply | None = None
        self._answered_s = self._ask_again_s = self._clock.monotonic_s()
        self._waits_for_ever = False
        self._changes = ChangeLogger(_logger)

    def run(self, wait: Callable[[float], bool]) -> None:
        """Run until the end, or until wait(seconds) returns true, which is a request to stop. A master that goes away
        in the middle of its run is waited for without limit: its operator brings it back.

        Raises RetryLater when no first answer came for patience_s, or none of a run that was stopping; Refused for any
        refusal except a version that is gone.
        """
        pause_s = 0.0
        while not wait(pause_s):
            try:
                status = self._end or self._asked()  # the servers of a run that has ended need not say so again
                wanted = next_version(status, self._last)
                if wanted is None and (status.stopped or (self._once and self._last is not None)):
                    return
                before = self._last
                pause_s = 0.0 if wanted is not None and self._use_one(wanted) else POLL_S
                if self._once and self._last != before:
                    return
            except RetryLater as error:
                if wait(0.0):
                    return
                away_s = self._clock.monotonic_s() - self._answered_s
                if away_s >= self._patience_s and not self._waits_for_ever:
                    sentence = f"the run could not be read for {away_s:.0f} s: {error}"
                    raise RetryLater(sentence, error.retry_after_s) from error
                self._changes.report("master", f"waiting for the run: {error}", logging.WARNING)
                pause_s = max(POLL_S, min(error.retry_after_s, self._patience_s / 4))

    def _use_one(self, wanted: Version) -> bool:
        """Use one version. Returns whether there was a new one."""
        try:
            fetched = self._fetch(None if self._newest_only else wanted)
        except Refused as refused:
            if refused.code is not RefusalCode.VERSION_GONE:
                raise
            fetched = self._fetch(None)
        self._answered()
        if fetched.version == self._last:
            return False
        if self._last is not None and fetched.version.timeline != self._last.timeline:
            _logger.warning("the run was rolled back: version %s comes after %s", fetched.version, self._last)
        try:
            self._use(fetched, lambda: self._look_past(fetched.version))
        except _Superseded:
            return True
        self._last = fetched.version
        return True

    def _look_past(self, version: Version) -> None:
        """Ask now and then while a version is used. Raises _Superseded."""
        if self._clock.monotonic_s() < self._ask_again_s:
            return
        try:
            self._asked()
        except RetryLater:  # run() asks with more patience
            self._ask_again_s = self._clock.monotonic_s() + self._patience_s / 4
        if self._end is not None and next_version(self._end, version) is not None:
            raise _Superseded

    def _asked(self) -> StatusReply:
        status = self._status()
        self._answered()
        self._waits_for_ever = not (status.stopping or status.stopped)
        self._end = status if status.stopped else None
        self._ask_again_s = self._answered_s + POLL_S
        return status

    def _answered(self) -> None:
        self._answered_s = self._clock.monotonic_s()
        self._changes.report("master", "")


def follow_run(
    master: str,
    run_id: str,
    name: str,
    security: Security,
    use: Callable[[PublishedModel, Callable[[], None]], None],
    wait: Callable[[float], bool],
    *,
    patience_s: float,
    call_deadline_s: float = CALL_DEADLINE_S,
    held: PublishedModel | None = None,
    newest_only: bool = False,
    once: bool = False,
    cancelled: threading.Event | None = None,
) -> None:
    """Fetch and use the versions of a run until it has stopped, each as differences to the last one where it can be.

    held: the version that was used last; its parameters, and those that `use` gets, are not to be changed. use, wait,
    patience_s, newest_only, once: as a Follower has them. Raises what Follower.run and fetch_version do.
    """

    has_differences = True

    def status() -> StatusReply:
        nonlocal has_differences
        told = watch.status()
        has_differences = told.settings.pull_wire != Settings.pull_wire
        return told

    def fetch(version: Version | None) -> PublishedModel:
        nonlocal held
        fetched = fetch_version(
            masters, run_id or None, name, security, version=version, deadline_s=FETCH_DEADLINE_S, base=held,
            cancelled=cancelled,
        )  # fmt: skip
        held = fetched if has_differences else None  # else it only takes memory
        return fetched

    last = None if held is None else held.version
    masters = MasterAddresses(master)
    with RunWatch(masters, run_id, call_deadline_s, security) as watch:
        Follower(
            status, fetch, use, patience_s, last=last, newest_only=newest_only, once=once
        ).run(wait)  # fmt: skip


def name_of(security: Security) -> str:
    """Under which name to read: a cluster's keys name the cluster, an operator reads under any name."""
    if isinstance(security, Identity) and security.role is not Role.OPERATOR:
        return security.name
    return f"follow-{secrets.token_hex(4)}"  # two of one name would take each other's pin
