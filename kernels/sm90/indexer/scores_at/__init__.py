"""Scores at given entries, and their gradients."""
