"""Keys for products of e4m3, from caches or from arrays: their codes, and what the unit of these is found from."""
