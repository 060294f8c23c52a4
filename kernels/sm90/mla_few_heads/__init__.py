"""Attention over such a latent at few heads, whose keys differ from query to query: forward and backward."""
