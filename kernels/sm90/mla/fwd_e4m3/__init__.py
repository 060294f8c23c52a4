"""Attention over a latent that is both K and V, head dimension 512: kernel.py, and its parts."""
