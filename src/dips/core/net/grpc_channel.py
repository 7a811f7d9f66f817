"""Opens channels to the master: over mutual TLS with an identity, in the clear on loopback without one.

Every client of the control flow opens its channels here. Must never dial another machine without keys.
"""

from __future__ import annotations

import grpc
import grpc.aio

from dips.core.net.addresses import format_address, parse_address
from dips.core.net.grpc_refusal import channel_options
from dips.core.net.keys import MASTER_DNS_NAME, reloaded
from dips.core.net.security import Identity, Security, check_reach


def open_channel(address: str, security: Security, max_message_bytes: int) -> grpc.Channel:
    """A channel to the master at "host:port"; connects when first used.

    Raises ConfigError for an address that is not one, or that is not loopback while there are no keys.
    """
    target, options = _target(address, security, max_message_bytes)
    if isinstance(security, Identity):
        return grpc.secure_channel(target, _credentials(security), options=options)
    return grpc.insecure_channel(target, options=options)


def open_channel_aio(address: str, security: Security, max_message_bytes: int) -> grpc.aio.Channel:
    """open_channel for an event loop."""
    target, options = _target(address, security, max_message_bytes)
    if isinstance(security, Identity):
        return grpc.aio.secure_channel(target, _credentials(security), options=options)
    return grpc.aio.insecure_channel(target, options=options)


def _target(address: str, security: Security, max_message_bytes: int) -> tuple[str, list[tuple[str, int | str]]]:
    check_reach(address, "the master's address", security)
    options: list[tuple[str, int | str]] = [*channel_options(max_message_bytes)]
    if isinstance(security, Identity):
        options.append(("grpc.ssl_target_name_override", MASTER_DNS_NAME))
    return format_address(*parse_address(address, "the master's address")), options


def _credentials(identity: Identity) -> grpc.ChannelCredentials:
    identity = reloaded(identity)  # keys are renewed while a run goes on
    return grpc.ssl_channel_credentials(identity.ca_pem, identity.key_pem, identity.cert_pem)
