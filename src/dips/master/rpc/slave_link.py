"""The master's end of a slave's stream: the queue of commands, and the end of the stream.

A slave that does not read must never make the master hold more than LINK_COMMANDS commands for it.
"""

from __future__ import annotations

import asyncio
from collections import deque

from dips.core.errors import Refused
from dips.core.messages import SlaveCommand

LINK_COMMANDS = 4096
"""The most waiting commands for one slave. A round and a push each need about four, so this is many seconds of
work of a hundred clusters; a slave that is so far behind no longer reads its connection."""


class SlaveLink:
    """One stream. `number` identifies it in events and effects and is never used again."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._commands: deque[SlaveCommand] = deque()
        self._more = asyncio.Event()
        self._closing = asyncio.Event()
        self._end: Refused | None = None

    @property
    def closing(self) -> bool:
        return self._closing.is_set()

    def offer(self, command: SlaveCommand) -> bool:
        """Queues a command. False: the link is closing or its queue is full, and the command is dropped."""
        if self.closing or len(self._commands) >= LINK_COMMANDS:
            return False
        self._commands.append(command)
        self._more.set()
        return True

    def close(self, refused: Refused | None) -> None:
        """Ends the stream after the waiting commands: with a refusal, or without one when the slave hung up.

        A second call changes nothing.
        """
        if not self.closing:
            self._end = refused
            self._closing.set()
            self._more.set()

    async def next_command(self) -> SlaveCommand | None:
        """The oldest waiting command; None once the link is closed and none is left."""
        while not self._commands and not self.closing:
            self._more.clear()
            await self._more.wait()
        return self._commands.popleft() if self._commands else None

    async def closed(self) -> Refused | None:
        """Waits until the link is closed, and returns the refusal, if there is one."""
        await self._closing.wait()
        return self._end
