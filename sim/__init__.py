"""A whole run under a virtual clock, and the judges of any run. It may import the roles; no role imports it."""

if __name__ != "dips.sim":
    raise ImportError(
        f"import dips.sim, not {__name__}: the folder at the top of the repository is the same code under a second name"
    )
