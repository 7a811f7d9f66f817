"""Whom this slave's data port lets in, and what each of them may ask. Pure.

The list is the master's (Allow). A connection belongs to a key for as long as it lasts, and every message is judged by
the list as it is now: a key that left it is worth nothing from the next message on. Without a list nobody is let in.
"""

from __future__ import annotations

from collections.abc import Sequence

from dips.core.errors import RefusalCode, Refused
from dips.core.messages import Allow, AllowedKey, KeyRole
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.protocol import CURVE_KEY_BYTES

MAX_ALLOWED = 4096
"""Keys that a list may hold: more than any run has clusters; 200 bytes each."""

MAX_OWNER_CHARACTERS = 128


class Admission:
    """User ids are those that a connection is given when its key is let in: the key, in hexadecimal."""

    def __init__(self) -> None:
        self._listed: dict[str, AllowedKey] = {}

    def set_keys(self, keys: Sequence[AllowedKey]) -> None:
        """From now on these and no others."""
        self._listed = {allowed.curve_key.hex(): allowed for allowed in keys}

    def user_of(self, key: bytes) -> str | None:
        """The user id of a key that is on the list; None: it is not let in."""
        user = key.hex()
        return user if user in self._listed else None

    def listed(self, user: str) -> bool:
        """Whether the key of this connection still is on the list."""
        return user in self._listed

    def owner(self, user: str) -> str:
        """For people."""
        allowed = self._listed.get(user)
        return "nobody" if allowed is None else f"{allowed.role.name.lower()} {allowed.owner}"

    def check(self, user: str, header: DataHeader) -> None:
        """Raises Refused(KEY) unless the owner of the connection may ask this.

        A push is touched by its own cluster alone; whoever is on the list may read parameters, slaves momentum too.
        """
        allowed = self._listed.get(user)
        if allowed is None:
            raise Refused(
                RefusalCode.KEY,
                f"data key {user[:8]} is not on the master's list any more: its owner joined anew, left, was evicted "
                "or revoked",
            )
        if header.op is DataOp.GET_CHUNK and (allowed.role is KeyRole.SLAVE or not header.momentum):
            return
        if header.op is DataOp.GET_CHUNK:
            raise Refused(RefusalCode.KEY, f"the momentum is for slaves alone, not for {self.owner(user)}")
        if allowed.role is not KeyRole.CLUSTER or header.push is None or header.push.cluster != allowed.owner:
            raise Refused(
                RefusalCode.KEY,
                f"push {header.push} is not {self.owner(user)}'s: a cluster sends its own pushes only",
            )


def what_is_wrong(allow: Allow) -> str:
    """Why a list cannot be used; empty when it can."""
    keys = allow.keys
    if len(keys) > MAX_ALLOWED:
        return f"it lists {len(keys)} keys, at most {MAX_ALLOWED} can be"
    if any(len(allowed.curve_key) != CURVE_KEY_BYTES for allowed in keys):
        return f"it lists a key that has not {CURVE_KEY_BYTES} bytes"
    if any(not 0 < len(allowed.owner) <= MAX_OWNER_CHARACTERS for allowed in keys):
        return f"it lists an owner whose name has not 1 to {MAX_OWNER_CHARACTERS} characters"
    if len({allowed.curve_key for allowed in keys}) != len(keys):
        return "it lists one key for two owners"
    return ""
