"""A disk that keeps what was synced and nothing else, which can lose power before any of its steps.

After the power is lost, `images()` are all the disks that may be found: every subset of the writes that were not
synced, each whole or half, and the names up to any that was not synced. The real ring must recover from all of them.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import BinaryIO

from dips.slave.disk import OnWritten

Image = dict[str, bytes]


class PowerLossError(BaseException):
    """The process is dead: nothing may catch it and go on."""


@dataclass(eq=False)
class Inode:
    now: bytes = b""
    safe: bytes = b""
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def write(self, at: int, data: bytes) -> None:
        self.now = _overlay(self.now, at, data)
        self.pending.append((at, data))

    def sync(self) -> None:
        self.safe, self.pending = self.now, []

    def outcomes(self) -> set[bytes]:
        """What may stand in it after a loss of power."""
        choices = [[None, write, (write[0], write[1][: len(write[1]) // 2])] for write in self.pending]
        return {self._with(chosen) for chosen in itertools.product(*choices)}

    def _with(self, writes: Sequence[tuple[int, bytes] | None]) -> bytes:
        data = self.safe
        for write in writes:
            data = data if write is None else _overlay(data, *write)
        return data


class CrashDisk:
    """steps: how many steps are carried out before the power is lost; None: all."""

    def __init__(self, image: Image | None = None, steps: int | None = None) -> None:
        self._names = {name: Inode(data, data) for name, data in (image or {}).items()}
        self._histories: list[dict[str, Inode]] = [dict(self._names)]
        self._steps_left = steps
        self.log: list[str] = []
        self.fail_next: OSError | None = None

    def _step(self, what: str) -> None:
        if self._steps_left is not None:
            if self._steps_left == 0:
                raise PowerLossError(what)
            self._steps_left -= 1
        self.log.append(what)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error

    def images(self) -> list[Image]:
        """All that may be found after the power was lost now, each once. Names appear and go in their order."""
        found: dict[tuple[tuple[str, bytes], ...], Image] = {}
        for names in self._histories:
            files = sorted(names.items())
            for contents in itertools.product(*(inode.outcomes() for _, inode in files)):
                image = {name: content for (name, _), content in zip(files, contents, strict=True)}
                found[tuple(image.items())] = image
        return list(found.values())

    def where(self, name: str) -> str:
        return f"disk:{name}"

    def names(self) -> list[str]:
        return sorted(self._names)

    def open(self, name: str) -> BinaryIO:
        return BytesIO(self._inode(name).now)

    def missing_bytes(self, name: str, n_bytes: int) -> int:
        inode = self._names.get(name)
        return n_bytes if inode is None else abs(n_bytes - len(inode.now))

    def free_bytes(self) -> int:
        return 12345

    def allocate(self, name: str, n_bytes: int) -> None:
        self._step(f"allocate {name}")
        inode = self._names.get(name) or Inode()
        inode.now = inode.now[:n_bytes].ljust(n_bytes, b"\0")
        inode.sync()
        self._rename({**self._names, name: inode})

    def overwrite(
        self, name: str, at: int, data: memoryview, seen: OnWritten | None = None, straight: bool = False
    ) -> None:
        self._step(f"write {name}")
        if seen is not None:
            seen(data)
        self._inode(name).write(at, bytes(data))

    def create(self, name: str, data: bytes) -> None:
        self._step(f"create {name}")
        inode = Inode()
        inode.write(0, data)
        self._rename({**self._names, name: inode})

    def sync(self, name: str) -> None:
        self._step(f"sync {name}")
        self._inode(name).sync()

    def rename(self, old: str, new: str) -> None:
        self._step(f"rename {new}")
        names = dict(self._names)
        names[new] = names.pop(old)
        self._rename(names)

    def remove(self, name: str) -> None:
        self._step(f"remove {name}")
        self._rename({other: inode for other, inode in self._names.items() if other != name})

    def sync_names(self) -> None:
        self._step("sync names")
        self._histories = [dict(self._names)]

    def _rename(self, names: dict[str, Inode]) -> None:
        self._names = names
        self._histories.append(names)

    def _inode(self, name: str) -> Inode:
        try:
            return self._names[name]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name) from None


def _overlay(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at].ljust(at, b"\0") + new + data[at + len(new) :]
