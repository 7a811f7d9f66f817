"""The benchmark of storms: processes that come, beat and go by the hundred."""
