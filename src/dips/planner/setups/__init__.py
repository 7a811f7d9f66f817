"""The settings of published evaluations, one TOML file each; dips.planner.cluster reads them."""
