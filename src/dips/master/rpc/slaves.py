"""The service Slaves: one stream for each slave, with commands to it, and answers and heartbeats from it.

Both directions run concurrently: messages of a slave that is busy with a command are still received, and a slave that
does not read cannot block the master.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence

import grpc

from dips.core.errors import Refused
from dips.core.messages import SlaveMessage
from dips.core.net.codec_protobuf import encode
from dips.core.observe.failpoints import copies, failpoint
from dips.master.rpc.calls import Context, refuse, service, understood
from dips.master.rpc.slave_link import SlaveLink
from dips.master.shell import MasterShell

_logger = logging.getLogger(__name__)

LAST_COMMANDS_S = 2.0
"""The time for a closing link to send the waiting commands; a slave that does not read gets fewer."""


def slaves_service(shell: MasterShell) -> grpc.GenericRpcHandler:
    """The handler of dips.v1.Slaves."""

    async def attach(messages: AsyncIterator[bytes], context: Context) -> None:
        link = shell.open_link()
        receive = asyncio.create_task(_receive(shell, link, messages), name=f"slave-link-{link.number}-up")
        command = asyncio.create_task(_command(link, context), name=f"slave-link-{link.number}-down")
        try:
            refused = await link.closed()
            await asyncio.wait([command], timeout=LAST_COMMANDS_S)
        finally:
            for task in (receive, command):
                task.cancel()
            ends = await asyncio.gather(receive, command, return_exceptions=True)
            _report_broken(link, ends)
            shell.link_down(link)
        if refused is not None:
            await refuse(shell, "Attach", context, refused)

    return service("Slaves", {"Attach": grpc.stream_stream_rpc_method_handler(attach)})


def _report_broken(link: SlaveLink, ends: Sequence[BaseException | None]) -> None:
    for error in ends:
        if isinstance(error, Exception):
            kind = type(error).__name__
            _logger.warning("the stream of slave link %d broke: %s: %s", link.number, kind, error)


async def _receive(shell: MasterShell, link: SlaveLink, messages: AsyncIterator[bytes]) -> None:
    """Passes on the slave's messages until it hangs up; closes the link after a message that cannot be decoded."""
    try:
        async for data in messages:
            for _ in range(copies(failpoint("master.slave_stream.before_hear"))):
                shell.slave_said(link, understood(shell, "Attach", data, SlaveMessage))
    except Refused as refused:
        link.close(refused)
    finally:
        link.close(None)


async def _command(link: SlaveLink, context: Context) -> None:
    """Sends the commands in their order until the link is closed and none is left."""
    try:
        while (command := await link.next_command()) is not None:
            for _ in range(copies(failpoint("master.slave_stream.before_send"))):
                await context.write(encode(command))
    finally:
        link.close(None)
