"""The judges of results: cases of every op, loops in float64, one comparison; for tests and `check`."""
