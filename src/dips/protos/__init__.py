"""The messages on the wire: `.proto` files, and the stubs that `make protos` writes of them."""
