"""Attention at d 512 for few heads whose keys differ from query to query: kernel.py, and its parts."""
