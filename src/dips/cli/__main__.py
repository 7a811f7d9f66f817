"""Runs the `dips` command as `python -m dips.cli`: so a launcher starts its children, whatever the PATH says."""

from dips.cli.main import main

main()
