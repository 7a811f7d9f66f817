"""The master's state machines: pure functions (state, event, now) -> effects. No I/O, no clock, no threads."""
