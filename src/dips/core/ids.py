"""The protocol's identifiers and their order: frozen, hashable, with a text form that logs, tapes and files share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NewType

from dips.core.errors import ConfigError

RunId = NewType("RunId", str)
ClusterId = NewType("ClusterId", str)
SlaveId = NewType("SlaveId", str)

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?\Z")


def check_name(name: str, what: str) -> str:
    """Return `name` if it can be used in paths, logs and Kubernetes labels; raise ConfigError otherwise."""
    if not _NAME.match(name):
        raise ConfigError(
            f"{what} {name!r} is not a name: use 1 to 63 of a-z, 0-9, '.', '_' and '-', beginning and ending "
            "with a letter or digit"
        )
    return name


@dataclass(frozen=True, order=True)
class Incarnation:
    """One start of a cluster or slave: the master's epoch in which it began, and a count."""

    epoch: int
    n: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.n}"


@dataclass(frozen=True, order=True)
class Version:
    """A published model: number v on a timeline."""

    timeline: int
    v: int

    def __str__(self) -> str:
        return f"{self.timeline}:{self.v}"

    def next(self) -> Version:
        return Version(self.timeline, self.v + 1)

    def behind(self, published: Version | None) -> int | None:
        """Versions from this one to the published one; None when they are not of one timeline."""
        if published is None or published.timeline != self.timeline:
            return None
        return max(0, published.v - self.v)


@dataclass(frozen=True, order=True)
class RoundId:
    """One outer step that was begun, whether it was committed or not."""

    epoch: int
    n: int

    def __str__(self) -> str:
        return f"r{self.epoch}.{self.n}"


@dataclass(frozen=True, order=True)
class PushId:
    """One cluster's parameters for a round. Its bytes never change: a new attempt sends the same ones."""

    cluster: ClusterId
    incarnation: Incarnation
    seq: int

    def __str__(self) -> str:
        return f"{self.cluster}/{self.incarnation}#{self.seq}"


@dataclass(frozen=True, order=True)
class DataRange:
    """Tokens [begin_tokens, end_tokens) of one chunk of the corpus, in one pass over it, that a cluster leases."""

    lease_id: int
    pass_index: int
    chunk: int
    begin_tokens: int
    end_tokens: int

    @property
    def tokens(self) -> int:
        return self.end_tokens - self.begin_tokens


def parse_version(text: str) -> Version:
    """Read '3:17' (timeline 3, v 17); raises ConfigError."""
    timeline, colon, v = text.partition(":")
    if not (colon and timeline.isdecimal() and v.isdecimal()):
        raise ConfigError(f"{text!r} is not a version: write TIMELINE:NUMBER, as `dips status` prints it")
    return Version(int(timeline), int(v))
