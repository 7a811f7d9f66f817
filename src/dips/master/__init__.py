"""The master: rounds, membership, verdicts, leases. Never holds parameters."""

if __name__ != "dips.master":
    raise ImportError(
        f"import dips.master, not {__name__}: the link at the top of the repository leads to the same code "
        "under a second name"
    )
