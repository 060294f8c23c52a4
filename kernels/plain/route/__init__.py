"""A router after its product: the experts of each token, and their weights."""
