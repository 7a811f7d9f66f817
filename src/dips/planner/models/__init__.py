"""Descriptions of published models, one TOML file each; dips.planner.model reads them."""
