"""Scores of all entries, of keys in 4 bits."""
