"""Which slots of its caches each query of a step sees."""
