"""What `dips papers` reads of other commands, so that their own tests see that it still can."""

from __future__ import annotations

from dips.papers.di_ps import SOURCES

SOURCES_OF_DI_PS = {source.name: source for source in SOURCES}
