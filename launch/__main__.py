"""`python -m dips.launch` is the `dips` command: how a launcher starts its children, whatever the PATH says."""

from dips.launch.cli import main

main()
