"""Reads a published version from outside of a cluster: for export, evaluation and the held-out evaluator.

A reader holds a pin while it fetches, and renews it while bytes arrive, so that rounds go on meanwhile and it never
blocks one. Returns only a whole version in which every share has the digest of its COMMIT record (I3).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import zmq

from dips.core.clock import Clock, SystemClock
from dips.core.errors import Refused, RemoteProtocolError, RetryLater
from dips.core.ids import Version
from dips.core.layout import PublishedModel
from dips.core.messages import (
    BeginPullReply,
    BeginPullRequest,
    Busy,
    Caller,
    FinishPullRequest,
    PullGrant,
)
from dips.core.net.addresses import check_slaves_reachable
from dips.core.net.carriers import Common, carry_pull
from dips.core.net.security import Security
from dips.core.net.tls_probe import check_let_in
from dips.core.net.transfer import LEAST_BYTES_PER_S, SlaveProgress, TransferSettings
from dips.core.net.zmq_sockets import CurvePair, pair_for
from dips.core.observe.tape import new_cause
from dips.worker.control import MasterStubs, channel_to
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
    master: str,
    run_id: str | None,
    name: str,
    security: Security,
    version: Version | None = None,
    at_least: Version | None = None,
    deadline_s: float = 60.0,
    clock: Clock | None = None,
) -> PublishedModel:
    """Fetch exactly `version`, else the newest one that is published (and at least `at_least`).

    Waits for it up to deadline_s; a transfer that is under way then goes on while bytes arrive. Raises Refused
    (VERSION_GONE names the versions that are kept; RUN_ID), RetryLater when the time is over (with the last reason),
    RemoteProtocolError for shares that contradict their digest, and ConfigError for an address that cannot be used, or
    slaves that only their own machine reaches.
    """
    check_let_in(master, security)
    with channel_to(master, security) as channel:
        curve = pair_for(security)
        reader = _Reader(MasterStubs(channel), master, run_id or "", name, deadline_s, clock or SystemClock(), curve)
        return reader.fetch(version, at_least)


class _Reader:
    def __init__(
        self,
        stubs: MasterStubs,
        master: str,
        run_id: str,
        name: str,
        deadline_s: float,
        clock: Clock,
        curve: CurvePair | None,
    ) -> None:
        self._curve = curve
        self._stubs = stubs
        self._master = master
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
        check_slaves_reachable(self._master, grant.placement.slaves)
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
            try:
                transfer = carry_pull(context, common, flat, grant, self._clock, threading.Event())
            finally:
                context.destroy(linger=0)
        if transfer.done:
            return PublishedModel(grant.run_id, grant.version, grant.tokens, layout, flat)
        if transfer.corrupt:
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
        return BeginPullRequest(self._caller(), True, version, exact, key, pin_id=pin_id)

    def _caller(self) -> Caller:
        return Caller(self._run_id, 0, self._name, None, self._cause)

    def _pause(self, wanted_s: float, why: str) -> None:
        """Wait before the next try. Raises RetryLater when the time is over."""
        left_s = self._until_s - self._clock.monotonic_s()
        if left_s <= 0:
            raise RetryLater(f"no version could be read in time: {why}")
        time.sleep(min(left_s, max(0.05, min(wanted_s, LONGEST_PAUSE_S))))
