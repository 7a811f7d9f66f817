"""Runs on one machine: starts their processes, and reads and writes their files and reports."""
