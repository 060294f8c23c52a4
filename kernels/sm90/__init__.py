"""Kernels for Hopper."""
