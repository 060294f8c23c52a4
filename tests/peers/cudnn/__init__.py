"""A stand-in for the cuDNN frontend: the API of its indexer, and its numbers by NumPy."""

__version__ = "1.32.0"
