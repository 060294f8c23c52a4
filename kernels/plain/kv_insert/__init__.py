"""New entries of a cache: pooled, normed, turned, packed and written."""
