"""Attention with separate K and V, d up to 256: forward and backward."""
