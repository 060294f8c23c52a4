"""Scores at given entries."""
