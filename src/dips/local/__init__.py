"""Runs on one machine: their processes, files and reports."""
