"""The messages on the wire: `.proto` files, and what `make protos` writes of them (generate.py)."""
