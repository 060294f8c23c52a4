"""Hyper-connections: what is between two sublayers of a model whose residual has several streams."""
