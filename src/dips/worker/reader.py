"""Reads a published version from outside of a cluster: for export, evaluation and the held-out evaluator.

A reader holds a pin while it fetches, so that rounds go on meanwhile, and never blocks one. Returns only a whole
version in which every share has the digest of its COMMIT record (I3).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
import zmq
from numpy.typing import NDArray

from dips.core.clock import Clock, SystemClock
from dips.core.errors import RemoteProtocolError, RetryLater
from dips.core.ids import Version
from dips.core.layout import Layout
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
from dips.core.net.transfer import TransferSettings
from dips.core.net.zmq_sockets import CurvePair, pair_for
from dips.core.observe.tape import new_cause
from dips.worker.control import MasterStubs, channel_to
from dips.worker.state.pulling import check_placement

CALL_DEADLINE_S = 10.0
LONGEST_PAUSE_S = 1.0
WINDOW_CHUNKS = 16


@dataclass(frozen=True)
class FetchedModel:
    """One complete version."""

    run_id: str
    layout: Layout
    version: Version
    tokens: int  # applied up to this version
    flat: NDArray[np.float32]  # float32 of layout.n_elems


def fetch_version(
    master: str,
    run_id: str | None,
    name: str,
    security: Security,
    version: Version | None = None,
    at_least: Version | None = None,
    deadline_s: float = 60.0,
    clock: Clock | None = None,
) -> FetchedModel:
    """Fetch exactly `version`, else the newest one that is published (and at least `at_least`).

    Waits for it up to deadline_s. Raises Refused (VERSION_GONE names the versions that are kept; RUN_ID), RetryLater
    when the time is over (with the last reason), RemoteProtocolError for shares that contradict their digest, and
    ConfigError for an address that cannot be used, or slaves that only their own machine reaches.
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

    def fetch(self, version: Version | None, at_least: Version | None) -> FetchedModel:
        key = b"" if self._curve is None else self._curve.public
        request = BeginPullRequest(self._caller(), True, version or at_least, version is not None, key)
        while True:
            grant = self._granted(request)
            try:
                fetched = self._transfer(grant)
            finally:
                self._release(grant)
            if isinstance(fetched, FetchedModel):
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

    def _transfer(self, grant: PullGrant) -> FetchedModel | str:
        """The model, or why it could not be fetched this time."""
        layout = grant.layout
        if layout is None:
            raise RemoteProtocolError("the master granted a pull without the layout: both sides need one release")
        check_placement(grant.placement, len(layout.blocks))
        check_slaves_reachable(self._master, grant.placement.slaves)
        left_s = max(1.0, self._until_s - self._clock.monotonic_s())
        settings = TransferSettings(grant.chunk_bytes, WINDOW_CHUNKS, stall_s=min(30.0, left_s))
        common = Common(grant.run_id, grant.epoch, self._cause, layout, settings, curve=self._curve)
        flat = np.zeros(layout.n_elems, np.float32)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            transfer = carry_pull(context, common, flat, grant, self._clock, threading.Event())
        finally:
            context.destroy(linger=0)
        if transfer.done:
            return FetchedModel(grant.run_id, layout, grant.version, grant.tokens, flat)
        if transfer.corrupt:
            raise RemoteProtocolError(f"version {grant.version} cannot be read: {transfer.failure}")
        return transfer.failure

    def _release(self, grant: PullGrant) -> None:
        try:
            self._stubs.call(FinishPullRequest(self._caller(), grant.pin_id, True), CALL_DEADLINE_S)
        except RetryLater:
            pass  # the pin expires by itself

    def _caller(self) -> Caller:
        return Caller(self._run_id, 0, self._name, None, self._cause)

    def _pause(self, wanted_s: float, why: str) -> None:
        """Wait before the next try. Raises RetryLater when the time is over."""
        left_s = self._until_s - self._clock.monotonic_s()
        if left_s <= 0:
            raise RetryLater(f"no version could be read in time: {why}")
        time.sleep(min(left_s, max(0.05, min(wanted_s, LONGEST_PAUSE_S))))
