"""Products of few rows, as a step of generation has them, with a matrix."""
