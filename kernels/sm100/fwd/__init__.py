"""Attention of every kind that there is for Blackwell: kernel.py, and what serves it alone."""
