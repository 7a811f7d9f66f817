"""The status page of one master: opened before the first epoch, updated in each, closed at the end."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import Protocol, runtime_checkable

from dips.core.clock import Clock
from dips.core.net.addresses import dialable, format_address, parse_address
from dips.core.net.security import Identity, Security, check_reach
from dips.master.access import Access
from dips.master.config import MasterConfig
from dips.master.directory import TAPE_NAME
from dips.master.page.access import (
    LINK_PARAMETER,
    PageAccess,
    Secret,
    load_secret,
    remove_page_address,
    save_secret,
    write_page_address,
)
from dips.master.page.bounds import SAMPLE_S
from dips.master.page.event_buffer import EventBuffer, earlier_events
from dips.master.page.files import static_files
from dips.master.page.heldout import HeldoutTail
from dips.master.page.hub import Hub
from dips.master.page.server import PageServer
from dips.master.page.steering import Steering
from dips.master.page.web import PageApplication
from dips.master.shell import MasterShell
from dips.master.state.status import RunView

_logger = logging.getLogger(__name__)


@runtime_checkable
class Looked(Protocol):
    """A state machine that gives a view of the run between two events."""

    def look(self) -> RunView: ...


class Page:
    """The status page. Use it on the control loop's thread."""

    def __init__(
        self, config: MasterConfig, listen: str, security: Security, event_buffer: EventBuffer, clock: Clock
    ) -> None:
        """Listens at once. Raises ConfigError for an address that is taken, or that others can reach although there are
        no keys, and for a token that others can read."""
        check_reach(listen, "the status page's address", security)
        self._config, self._security, self._event_buffer, self._clock = config, security, event_buffer, clock
        self._steering = Steering(config.run_id)
        self._secret = load_secret(config.directory)
        self._host, port = parse_address(listen, "the status page's address")
        self._server = PageServer(self._host, port, self._secret.port, security, self._site)
        port = self._server.start()
        self.url = self._write(port)

    def close(self) -> None:
        """Tells open pages that the master has ended. May be called twice."""
        self._server.stop()
        remove_page_address(self._config.directory)

    async def follow(self, shell: MasterShell) -> None:
        """Takes samples of this shell's state until cancelled."""
        machine = shell.machine
        assert isinstance(machine, Looked), "the state machine of a run has look()"
        self._steering.follow(shell)
        while True:
            self._look(machine)
            await asyncio.sleep(SAMPLE_S)

    def _look(self, machine: Looked) -> None:
        view, wall_s = machine.look(), self._clock.wall_s()
        lag_s = max(0.0, self._clock.monotonic_s() - view.as_of_s)
        self._server.give(lambda site: site.hub.take(view, wall_s, lag_s))

    def _site(self, port: int) -> PageApplication:
        """Makes the application, on the page's thread."""
        config = self._config
        hub = Hub(self._event_buffer, HeldoutTail(config.page_heldout), earlier_events(config.directory / TAPE_NAME))
        names = {self._host, socket.gethostname(), *config.page_hosts}
        hosts = names if isinstance(self._security, Identity) else {*config.page_hosts}
        gate = PageAccess(Access(self._security, config.revoked), self._secret.token, port, hosts)
        return PageApplication(hub, gate, static_files(), self._steering if config.page_steer else None)

    def _write(self, port: int) -> str:
        """Writes the link to a file that only this user can read; returns it."""
        address = dialable(format_address(self._host, port))
        keyed = isinstance(self._security, Identity)
        directory = self._config.directory
        secret = Secret(self._secret.token, port)
        if secret != load_secret(directory):
            save_secret(directory, secret)
        url = f"https://{address}/?{LINK_PARAMETER}={self._secret.token}" if keyed else f"http://{address}/"
        write_page_address(directory, url, os.getpid())
        who = f"for operators, by certificate or by the link in {directory}/page.json" if keyed else "for this machine"
        _logger.info("the status page is at %s://%s, %s", "https" if keyed else "http", address, who)
        return url
