"""Pipeline schedules, one module each; every one is a function that returns a Schedule."""
