"""Kernels without tensor cores: one source, compiled for every architecture."""
