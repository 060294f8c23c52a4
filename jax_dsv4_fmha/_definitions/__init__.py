"""The definitions of results, in plain `jnp`: masks, caches and their layouts, the indexer, and gradients where no
kernel makes them. `reference.py` defines attention by it.
"""
