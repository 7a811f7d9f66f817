"""The settings of published evaluations, one TOML file each; dips.planner.setup reads them."""
