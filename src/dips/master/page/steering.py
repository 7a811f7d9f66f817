"""Carries out the requests of the status page, if the master's settings allow them: pause and resume rounds.

Nothing else: requests that remove something from a run (evict, drain, stop, reshard) need an operator's keys at the
service Operator. A request comes from the page's thread and is carried out on the control loop, like any operator's.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from dips.core.errors import RefusalCode, Refused
from dips.core.messages import OperatorReply, OperatorRequest
from dips.master.page.timeline import cut
from dips.master.shell import MasterShell
from dips.master.state.events import OperatorAction, OperatorCall, Pause, Resume

MAX_REASON = 200
"""Characters."""

CALL_S = 10.0


@dataclass(frozen=True)
class _Following:
    shell: MasterShell
    loop: asyncio.AbstractEventLoop


class Steering:
    """Passes requests from the page's thread to the shell that it shows."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._following: _Following | None = None

    def follow(self, shell: MasterShell) -> None:
        """Sends requests to this shell from now on, on the loop that calls this."""
        self._following = _Following(shell, asyncio.get_running_loop())

    async def ask(self, action: object, reason: object) -> str:
        """Makes a request, on the page's thread; returns the master's answer. Raises Refused or TimeoutError."""
        request = self._request(action, reason)
        following = self._following
        if following is None:
            raise Refused(RefusalCode.BUSY, "the master begins: ask again", retry_after_s=1.0)
        asked = asyncio.run_coroutine_threadsafe(_carried_out(following.shell, request), following.loop)
        return await asyncio.wait_for(asyncio.wrap_future(asked), CALL_S)

    def _request(self, action: object, reason: object) -> OperatorAction:
        request = OperatorRequest(self._run_id, cut(reason, MAX_REASON) if isinstance(reason, str) else "")
        match action:
            case "pause":
                return Pause(request)
            case "resume":
                return Resume(request)
        raise Refused(RefusalCode.MALFORMED, "the status page can only ask to pause and to resume")


async def _carried_out(shell: MasterShell, request: OperatorAction) -> str:
    reply = await shell.call(lambda token: OperatorCall(token, request))
    assert isinstance(reply, OperatorReply), "pause and resume are answered with a sentence"
    return reply.sentence
