"""Attention's probabilities at given entries, summed over heads: what the indexer learns from."""
