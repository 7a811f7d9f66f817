"""`python -m dips.cli` is the `dips` command: how a launcher starts its children, whatever the PATH says."""

from dips.cli.main import main

main()
