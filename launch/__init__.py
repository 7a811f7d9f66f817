"""The `dips` command and the launchers. Stands above the roles; no role may import it."""

if __name__ != "dips.launch":
    raise ImportError(
        f"import dips.launch, not {__name__}: the folder at the top of the repository is the same code "
        "under a second name"
    )
