"""The slave: holds blocks of the model on a CPU host. Never imports torch."""

if __name__ != "dips.slave":
    raise ImportError(
        f"import dips.slave, not {__name__}: the link at the top of the repository leads to the same code "
        "under a second name"
    )
