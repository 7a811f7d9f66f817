"""The slave: holds blocks of the model on a CPU host. Never imports torch."""

if __name__ != "dips.slave":
    raise ImportError(
        f"import dips.slave, not {__name__}: the folder at the top of the repository is the same code "
        "under a second name"
    )
