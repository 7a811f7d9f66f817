"""The master's decisions, pure: (state, event, now) -> effects. No I/O, no clock, no threads."""
