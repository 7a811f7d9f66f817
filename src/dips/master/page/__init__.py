"""The status page, which the master serves to browsers. It reads the run, and steers it only if that is enabled."""
