"""The floor: what every role may import, and what imports no role."""

if __name__ != "dips.core":
    raise ImportError(
        f"import dips.core, not {__name__}: the folder at the top of the repository is the same code "
        "under a second name"
    )
