"""What a standby has of the journal, and how long a decision waits for it. Pure: time is an argument.

A decision is told to anyone only once it is durable at the master, and, where the settings ask for that, at a standby
that keeps up. One that is away or late holds nothing up: it is waited for again once it has every record that the
master had when it came back.
"""

from __future__ import annotations

from dips.core.errors import RefusalCode, Refused

TAKE_OVER_EPOCHS = 1000
"""A take-over begins an epoch so many above: the other master may be started again and again, and has none of these."""

REPLACED_PAUSE_S = 5.0
"""Pause between two tries to tell the master that was taken over from: it may come back after days."""

MOST_HALVINGS = 10


class Replication:
    """Of one epoch of a master. Records are counted from the first one of the journal."""

    def __init__(self, written: int, *, wanted: bool, limit_s: float) -> None:
        """written: the newest record. wanted: whether decisions wait for a standby, each at most limit_s."""
        self.written = written
        """The newest record that is durable here, or that the standby was sent."""
        self.in_step = False
        """Whether decisions wait: a standby follows, and has all but the newest ones."""
        self._wanted, self._limit_s = wanted, limit_s
        self._follows = False
        self._acknowledged = 0
        self._whole = 0  # what it must have to be in step
        self._time_outs = 0  # in a row

    def follows(self, number: int) -> None:
        """A standby follows, with the records up to this one. They may be here before wrote() says so."""
        self._follows = True
        self._whole = self.written = max(self.written, number)
        self.heard(number)

    def sent(self, number: int, *, is_whole: bool) -> None:
        """The records up to this one are on their way to the standby. is_whole: there was no newer one."""
        self.written = max(self.written, number)
        if is_whole:
            self._whole = number

    def heard(self, number: int) -> None:
        """The records up to this one are on the standby's disk. Raises Refused for one that was not written."""
        if number > self.written:
            raise Refused(
                RefusalCode.MALFORMED, f"the standby acknowledges record {number}, and the newest is {self.written}"
            )
        self._acknowledged = number
        self.in_step = self.in_step or number >= self._whole

    def lost(self) -> None:
        """No standby follows."""
        self._follows = self.in_step = False

    def wrote(self, number: int, now_s: float) -> float:
        """The records up to this one are durable here; until when decisions in them wait for the standby. Each time-out
        in a row halves the wait: a slow standby is not to slow each decision."""
        self.written = max(self.written, number)
        return now_s + self._limit_s / (1 << min(self._time_outs, MOST_HALVINGS))

    def left_s(self, number: int, until_s: float, now_s: float) -> float:
        """For how long decisions up to this record still wait; 0: they count. Ask again when anything has changed."""
        if self._acknowledged >= number:
            self._time_outs = 0
            return 0.0
        if not (self._wanted and self.in_step):
            return 0.0
        if now_s >= until_s:
            self.in_step = False
            self._time_outs += 1
            return 0.0
        return until_s - now_s

    @property
    def trouble(self) -> str:
        """What is wrong with a standby that decisions are to wait for, as a sentence; empty: nothing."""
        if not self._wanted or self.in_step:
            return ""
        if self._follows:
            return "the standby has not all decisions yet: the newest are in this master's journal alone"
        return "no standby follows: decisions are in this master's journal alone"
