"""What a slave decides: pure code that takes (event, now) and returns effects."""
