"""Pipeline schedules, one module each, with a function that returns a Schedule."""
