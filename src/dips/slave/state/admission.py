"""Decides which keys this slave's data port admits and what the owner of each key may ask. Pure.

The list is the master's (Allow). A cluster has one key for each of its ranks, and each of them may do the same. A
connection belongs to one key for as long as it lasts. Every message is checked against the list as it is now: a key
that left it is refused from the next message on. Without a list no key is admitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from dips.core.errors import RefusalCode, Refused
from dips.core.messages import Allow, AllowedKey, KeyRole
from dips.core.net.data_header import DataHeader, DataOp
from dips.core.protocol import CURVE_KEY_BYTES, MAX_ALLOWED_KEYS

MAX_OWNER_CHARACTERS = 128


class Admission:
    """The list of admitted keys. A connection's user id is its key in hexadecimal, given when the key is admitted."""

    def __init__(self) -> None:
        self._listed: Mapping[str, AllowedKey] = {}

    def set_keys(self, keys: Sequence[AllowedKey]) -> None:
        """Replace the list: from now on these keys and no others are admitted."""
        self._listed = {allowed.curve_key.hex(): allowed for allowed in keys}

    @property
    def keys(self) -> Mapping[str, AllowedKey]:
        """The list, by user id: another object as soon as it is another list."""
        return self._listed

    def n_keys_above(self, most: int) -> int:
        """How many keys all owners together have beyond the first `most` of each."""
        keys_of = Counter((allowed.role, allowed.owner) for allowed in self._listed.values())
        return sum(max(0, n - most) for n in keys_of.values())

    def user_of(self, key: bytes) -> str | None:
        """The user id of a key that is on the list; None: it is not admitted."""
        user = key.hex()
        return user if user in self._listed else None

    def listed(self, user: str) -> bool:
        """Whether the key of this connection still is on the list."""
        return user in self._listed

    def owner(self, user: str) -> str:
        """Role and name of a user's owner, the same for all of its keys."""
        allowed = self._listed.get(user)
        return "no one" if allowed is None else owner_of(allowed.role, allowed.owner)

    def check(self, user: str, header: DataHeader) -> None:
        """Check a request against the list. Raises Refused(KEY) unless the connection's owner may make it.

        Only its own cluster may write or query a push; every listed owner may read parameters, slaves the momentum too.
        """
        allowed = self._listed.get(user)
        if allowed is None:
            raise Refused(
                RefusalCode.KEY,
                f"data key {user[:8]} is no longer on the master's list: its owner joined again, left, was evicted "
                "or revoked",
            )
        if header.op is DataOp.GET_CHUNK and (allowed.role is KeyRole.SLAVE or not header.momentum):
            return
        if header.op is DataOp.GET_CHUNK:
            raise Refused(RefusalCode.KEY, f"only slaves may read the momentum, not {self.owner(user)}")
        if allowed.role is not KeyRole.CLUSTER or header.push is None or header.push.cluster != allowed.owner:
            raise Refused(
                RefusalCode.KEY,
                f"push {header.push} is not {self.owner(user)}'s: a cluster sends its own pushes only",
            )


def owner_of(role: KeyRole, name: str) -> str:
    """As Admission.owner() says it."""
    return f"{role.name.lower()} {name}"


def what_is_wrong(allow: Allow) -> str:
    """Check a list of keys: the sentence that says why it cannot be used; empty when it can."""
    keys = allow.keys
    if len(keys) > MAX_ALLOWED_KEYS:
        return f"it lists {len(keys)} keys, at most {MAX_ALLOWED_KEYS} can be"
    if any(len(allowed.curve_key) != CURVE_KEY_BYTES for allowed in keys):
        return f"it lists a key that has not {CURVE_KEY_BYTES} bytes"
    if any(not 0 < len(allowed.owner) <= MAX_OWNER_CHARACTERS for allowed in keys):
        return f"it lists an owner whose name has not 1 to {MAX_OWNER_CHARACTERS} characters"
    if len({allowed.curve_key for allowed in keys}) != len(keys):
        return "it lists one key twice"
    return ""
