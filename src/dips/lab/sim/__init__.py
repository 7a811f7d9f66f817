"""Simulates a whole run under a virtual clock. It may import the roles; no role imports it."""
