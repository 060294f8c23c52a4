"""Attention for Blackwell with separate K and V: kernel.py, and its parts."""
