"""Simulates an evaluator: it pulls the newest version from time to time, and may omit to report the end of the pull."""

from __future__ import annotations

from typing import Any

from dips.core.messages import BeginPullReply, BeginPullRequest, Caller, FinishPullRequest, PullGrant
from dips.core.net.transfer import Transfer, TransferSettings
from dips.lab.sim.hosts.transfer import PullCarrier
from dips.lab.sim.world import Call, Host, World

EVERY_S = 6.0
DEADLINE_S = 4.0
WINDOW_CHUNKS = 4


class ReaderHost(Host):
    """One evaluator."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "reader")
        self.pulled = 0

    def boot(self) -> None:
        self.begin_process()
        self._ask()

    def _ask(self) -> None:
        self.kernel.after(self.kernel.jitter(EVERY_S), self, self._ask)
        request = BeginPullRequest(self._caller(), True, curve_key=self.world.key_of(self))
        Call(self.world, self, request, DEADLINE_S, self._granted)

    def _caller(self) -> Caller:
        return Caller(self.world.run_id, 0, self.name, None, "read")

    def _granted(self, result: Any) -> None:
        if not isinstance(result, BeginPullReply) or not isinstance(result.answer, PullGrant):
            return
        grant, plan = result.answer, self.world.plan
        settings = TransferSettings(grant.chunk_bytes, WINDOW_CHUNKS, plan.data_silence_s, plan.data_stall_s)
        PullCarrier.of_grant(
            self.world, self, plan.layout, settings, grant, lambda values: self._read(grant, values)
        ).pump()

    def _read(self, grant: PullGrant, values: Any) -> None:
        if not isinstance(values, Transfer):
            self.pulled += 1
            self.world.pulled(self.name, grant.version, values)
        if self.kernel.rng.random() < 0.8:
            Call(self.world, self, FinishPullRequest(self._caller(), grant.pin_id, True), DEADLINE_S, lambda _: None)
