"""Runs the `dips` command as `python -m dips`, as torchrun does for each rank of a cluster."""

from dips.cli.__main__ import main

main()
