"""RoPE, and the norm before it."""
