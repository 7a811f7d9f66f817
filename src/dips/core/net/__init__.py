"""What both ends of a wire need: headers, channels, keys, refusals."""
