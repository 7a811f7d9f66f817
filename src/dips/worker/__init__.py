"""What runs in a training cluster. The only place for torch."""

if __name__ != "dips.worker":
    raise ImportError(
        f"import dips.worker, not {__name__}: the link at the top of the repository leads to the same code "
        "under a second name"
    )
