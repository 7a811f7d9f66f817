"""What a process says of itself: log, tape, metrics; and failpoints, by which tests make it fail."""
