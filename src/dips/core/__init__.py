"""The floor: what every role may import, and what imports no role."""
