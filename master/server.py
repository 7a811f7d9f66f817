"""The master's gRPC server: which address, which limits, which services.

Everything that asks or answers dials in here; the master dials nobody. It must never serve an address that
others can reach, since peers are not authenticated, and never share its port with a second master.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from dips.core.errors import ConfigError
from dips.core.grpc_refusal import channel_options
from dips.core.net import format_address, parse_address, require_loopback
from dips.master.executor import Executor
from dips.master.services_clusters import clusters_service
from dips.master.services_operator import operator_service
from dips.master.services_slaves import slaves_service

STOP_GRACE_S = 0.5
"""How long open calls may take to end once their answers are given; heartbeat streams end by being cut."""

CALLS_FOR_EACH_PEER = 64
SPARE_CALLS = 1024
"""A peer has one stream and one or two calls open. Past 64 for each and 1024 for readers, gRPC refuses calls,
so that a client gone wild costs 100 KB of memory for each of a few thousand calls and no more."""


class _Current(grpc.GenericRpcHandler):
    """The services of the executor that is served now; none until the first."""

    def __init__(self) -> None:
        self.services: Sequence[grpc.GenericRpcHandler] = ()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        for service in self.services:
            handler = service.service(handler_call_details)
            if handler is not None:
                return handler
        return None


class MasterServer:
    """A bound server; start() makes it answer, for one executor after the other on the same port."""

    def __init__(self, max_message_bytes: int, peers: int) -> None:
        """`max_message_bytes` bounds every message, `peers` is the most clusters and slaves to expect."""
        self._current = _Current()
        self._started = False
        self._server = grpc.aio.server(
            options=channel_options(max_message_bytes),
            maximum_concurrent_rpcs=CALLS_FOR_EACH_PEER * peers + SPARE_CALLS,
        )

    def bind(self, address: str) -> str:
        """Take the port of `address` ("host:port", port 0: any that is free) and return the address with it.

        Raises ConfigError when the address is not on loopback or its port is taken.
        """
        require_loopback(address, "the master's listen address")
        host, asked_port = parse_address(address, "the master's listen address")
        try:
            port = self._server.add_insecure_port(format_address(host, asked_port))
        except RuntimeError:
            port = 0
        if port == 0:
            raise ConfigError(
                f"the master cannot listen on {address}: port {asked_port} is in use; stop the process that "
                "holds it, choose another port with --listen, or use port 0 to get a free one"
            )
        return format_address(host, port)

    async def start(self, executor: Executor) -> None:
        """Begin to answer, or go on for another executor: new calls are its from here on."""
        self._current.services = (clusters_service(executor), slaves_service(executor), operator_service(executor))
        if not self._started:
            self._started = True
            self._server.add_generic_rpc_handlers((self._current,))
            await self._server.start()

    async def stop(self) -> None:
        """Let answers that are given go out, then cut what is open. Also frees a port that was only bound."""
        await self._server.stop(STOP_GRACE_S)
