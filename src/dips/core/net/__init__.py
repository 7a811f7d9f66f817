"""Network code that both ends of a connection share: headers, channels, keys, refusals."""
