"""The judges of results: one table of cases, loops in float64, one comparison; for tests and `check`."""
