"""Observability of a process: log, tape, metrics; and failpoints, by which tests make it fail."""
