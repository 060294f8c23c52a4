"""Rows of tokens for experts, and the sums over what experts make of them."""
