"""The planner's error: a sentence about what the user did wrong, with the remedy."""

from __future__ import annotations

from dips.core.errors import ConfigError


class PlanError(ConfigError):
    """A plan, schedule or description is not possible: the sentence names the place and the remedy."""
