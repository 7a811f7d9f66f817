"""`dips doctor`: checks a deployment before the run, and reports what would go wrong and what to do about it."""
