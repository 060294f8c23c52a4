"""Sums arrays over the devices of a process."""
