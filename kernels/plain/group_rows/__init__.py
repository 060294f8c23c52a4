"""Rows in the order of their groups, and the tiles that they make up."""
