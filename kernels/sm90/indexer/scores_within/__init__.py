"""Scores of the keys in listed blocks."""
