"""Matrices in FP8, which a step's products read, as arrays in bfloat16 for products of many rows."""
