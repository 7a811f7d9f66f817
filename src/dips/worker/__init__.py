"""The code of a training cluster: client, training loop and model. Imports torch."""

if __name__ != "dips.worker":
    raise ImportError(
        f"import dips.worker, not {__name__}: the link at the top of the repository leads to the same code "
        "under a second name"
    )
