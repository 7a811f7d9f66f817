"""The slave's state machine: pure code that takes (event, now) and returns effects."""
