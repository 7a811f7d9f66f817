"""The simulated processes: one host around the real machine of each role."""
