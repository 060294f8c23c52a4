"""Attention to few queries over a latent, head dimension 512: first keys, then columns are shared out over CTAs."""
