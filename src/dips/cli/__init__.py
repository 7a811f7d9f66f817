"""The `dips` command and the launchers. Stands above the roles; no role may import it."""
