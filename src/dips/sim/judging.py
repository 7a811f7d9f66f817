"""Passes every fact to the invariants (dips.judge.invariants), in the form of journals, tapes and manifests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dips.core.messages import SnapshotInfo
from dips.judge.facts import decision_of
from dips.judge.invariants import Checker, Violation

if TYPE_CHECKING:
    from dips.sim.world import World


class Judge:
    """Judges each fact and adds violations to the run's list at once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._checker = Checker(durability=world.plan.durability)

    def journal(self, record: Mapping[str, Any]) -> None:
        self._report(self._checker.feed_journal(record))

    def tape(self, role: str, name: str, kind: str, fields: Mapping[str, Any]) -> None:
        self._report(self._checker.feed_tape(role, name, kind, fields, self._world.kernel.now_s))

    def manifest(self, slave: str, info: SnapshotInfo, record: bytes) -> None:
        self._report(
            self._checker.feed_manifest(
                slave,
                {
                    "version": str(info.version),
                    "round": str(info.round),
                    "digest": info.digest.hex(),
                    "commit_hash": info.commit_hash.hex(),
                    "commit_record": record.decode(),
                },
            )
        )

    def lost_journal(self, left: Iterable[Mapping[str, Any]]) -> None:
        """The master's disk is lost, or restored from a copy with these records."""
        made = (decision_of(record).version for record in left)
        self._checker.lost_journal({version for version in made if version is not None})

    def counts(self) -> Mapping[str, int]:
        """Invariant -> how many facts it judged."""
        return self._checker.counts()

    def finish(self) -> None:
        """The run is over: judge what was still waiting for a proof."""
        before = len(self._checker.violations)
        self._report(self._checker.finish()[before:])

    def _report(self, violations: list[Violation]) -> None:
        for violation in violations:
            self._world.checks.violated(str(violation))
