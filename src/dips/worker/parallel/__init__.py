"""Support for clusters of several ranks."""
