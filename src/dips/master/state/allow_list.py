"""Whose data keys the slaves let in: one for each cluster, reader and slave that is here. Pure.

Every slave is told the whole list after Welcome and whenever it changes, so that a key that leaves it is worth nothing
from then on. In memory only: keys live as long as processes, and after a restart everybody says its key anew. Never
holds one key for two owners, so that a message's key tells whose it is.
"""

from __future__ import annotations

from collections.abc import Collection

from dips.core.errors import RefusalCode, Refused
from dips.core.messages import AllowedKey, KeyRole
from dips.core.protocol import CURVE_KEY_BYTES


class AllowList:
    """encrypted: whether this run's data flow uses keys at all; without, nobody may bring one and nobody is told."""

    def __init__(self, encrypted: bool) -> None:
        self.encrypted = encrypted
        self._keys: dict[tuple[KeyRole, str], bytes] = {}
        self._told: tuple[AllowedKey, ...] = ()
        self._touched = False

    def check(self, role: KeyRole, owner: str, key: bytes) -> None:
        """Raises Refused(KEY) for a key that cannot be this owner's; changes nothing."""
        who = f"{role.name.lower()} {owner!r}"
        if not self.encrypted and key:
            raise Refused(
                RefusalCode.KEY,
                f"{who} brings a data key, and this run's data flow is not encrypted: start the master with --keys, or "
                "everybody with --insecure",
            )
        if self.encrypted and len(key) != CURVE_KEY_BYTES:
            raise Refused(
                RefusalCode.KEY,
                f"{who} brings a data key of {len(key)} bytes, {CURVE_KEY_BYTES} are needed: this run's data flow is "
                "encrypted; start every process with --keys",
            )
        holder = next((name for name, held in self._keys.items() if held == key), None)
        if holder is not None and holder != (role, owner):
            raise Refused(
                RefusalCode.KEY,
                f"{who} brings the data key of {holder[0].name.lower()} {holder[1]!r}: every process makes its own",
            )

    def put(self, role: KeyRole, owner: str, key: bytes) -> None:
        """This key of the owner's is let in, and no other of its. Raises Refused(KEY) as check() does."""
        self.check(role, owner, key)
        if self.encrypted:
            self._keys[role, owner] = key
            self._touched = True

    def remove(self, role: KeyRole, owner: str) -> None:
        """The owner is gone; one that is not on the list stays absent."""
        self._touched |= self._keys.pop((role, owner), None) is not None

    def keep(self, role: KeyRole, owners: Collection[str]) -> None:
        """Of this role nobody else is here any more."""
        for name in [name for name in self._keys if name[0] is role and name[1] not in owners]:
            self.remove(*name)

    def keys(self) -> tuple[AllowedKey, ...]:
        """All of it, in an order that does not depend on who came first."""
        return tuple(AllowedKey(role, owner, key) for (role, owner), key in sorted(self._keys.items()))

    def news(self) -> tuple[AllowedKey, ...] | None:
        """The list, if it is not what was told last; then it counts as told."""
        if not self._touched:
            return None
        self._touched, before, self._told = False, self._told, self.keys()
        return self._told if self._told != before else None
