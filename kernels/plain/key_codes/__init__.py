"""Keys for products of e4m3, from caches or from arrays: their codes, and the unit of each."""
