"""DeepSeek-V4 whole: a model that reads a checkpoint's directory, generates, serves and trains, in JAX."""
