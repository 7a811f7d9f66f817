"""The `dips` command and its sub-commands. It is above the roles; no role may import it."""
