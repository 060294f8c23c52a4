"""Adapters for others' code bases, a module each; only that module needs the other package (docs/howto)."""
