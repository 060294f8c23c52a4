"""Kernels for Blackwell."""
