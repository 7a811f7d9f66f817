"""A whole run under a virtual clock, and the judges of any run. It may import the roles; no role imports it."""
