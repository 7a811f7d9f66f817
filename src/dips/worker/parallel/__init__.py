"""Clusters of several ranks."""
