"""Merges the partial results of split keys."""
