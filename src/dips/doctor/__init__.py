"""`dips doctor`: looks at a deployment before the run, and says what would go wrong and what to do about it."""
