"""The status page: what the master shows in a browser. It reads the run, and steers it only where that was enabled."""
