"""Shared code that every role may import and that imports no role."""
