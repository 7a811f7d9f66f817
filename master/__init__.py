"""The master: rounds, membership, verdicts, leases. Never holds parameters."""

if __name__ != "dips.master":
    raise ImportError(
        f"import dips.master, not {__name__}: the folder at the top of the repository is the same code "
        "under a second name"
    )
