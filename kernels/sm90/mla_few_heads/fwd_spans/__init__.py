"""Attention at d 512 for few heads over spans, in the canonical order of sums: kernel.py, and its parts."""
