"""Scores of all entries."""
