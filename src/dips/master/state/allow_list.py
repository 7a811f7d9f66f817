"""The data keys that the slaves accept: one for each attached cluster, reader and slave. Pure.

Every slave receives the whole list after Welcome and whenever it changes, so a key that is removed is refused from then
on. In memory only: a key lasts as long as its process, and after a restart of the master every process sends its key
again. One key never belongs to two owners, so a message's key identifies its sender.
"""

from __future__ import annotations

from collections.abc import Collection

from dips.core.errors import RefusalCode, Refused
from dips.core.messages import AllowedKey, KeyRole
from dips.core.protocol import CURVE_KEY_BYTES


class AllowList:
    """The list of accepted data keys.

    encrypted: whether this run's data flow uses keys. If not, a process that brings a key is refused and no list is
    sent.
    """

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
                "all other processes with --insecure",
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
        """Makes this key the owner's only accepted key. Raises Refused(KEY) as check() does."""
        self.check(role, owner, key)
        if self.encrypted:
            self._keys[role, owner] = key
            self._touched = True

    def remove(self, role: KeyRole, owner: str) -> None:
        """Removes the owner, which is gone; does nothing when it is not on the list."""
        self._touched |= self._keys.pop((role, owner), None) is not None

    def keep(self, role: KeyRole, owners: Collection[str]) -> None:
        """Removes all other owners of this role."""
        for name in [name for name in self._keys if name[0] is role and name[1] not in owners]:
            self.remove(*name)

    def keys(self) -> tuple[AllowedKey, ...]:
        """The whole list, in an order that does not depend on the order of arrival."""
        return tuple(AllowedKey(role, owner, key) for (role, owner), key in sorted(self._keys.items()))

    def news(self) -> tuple[AllowedKey, ...] | None:
        """The list if it differs from the one returned last, else None. It then counts as sent."""
        if not self._touched:
            return None
        self._touched, before, self._told = False, self._told, self.keys()
        return self._told if self._told != before else None
