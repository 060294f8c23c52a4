"""Attention of every kind for Blackwell: kernel.py, and its parts."""
