"""The cluster's state machine, pure: (state, event, now) -> effects. No I/O, no clock, no threads, no parameters."""
