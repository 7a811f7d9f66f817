"""The record of a push that must be on disk before its number is used: its identity, its work and its base version.

A cluster that dies after BeginPush learns from this record, when it resumes, that the push may have been counted.
A value only; worker/checkpoint_store.py writes it, worker/state/saved.py gives it its JSON form.
"""

from __future__ import annotations

from dataclasses import dataclass

from dips.core.ids import PushId, Version
from dips.worker.state.work import Work


@dataclass(frozen=True)
class PushRecord:
    """The identity of one push. base None: it seeds the run, or gives back the version that it `donates`."""

    id: PushId
    base: Version | None
    fence: int
    work: Work
    donates: Version | None = None
