"""The greatest scores of every row."""
