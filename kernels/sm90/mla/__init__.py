"""Attention over one latent head that is both K and V, d 512: forward and backward."""
