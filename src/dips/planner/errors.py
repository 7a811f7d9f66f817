"""What a user of the planner did wrong, in a sentence with the remedy."""

from __future__ import annotations

from dips.core.errors import ConfigError


class PlanError(ConfigError):
    """A plan, a schedule or a description that cannot be: the sentence names the place and what to do."""
