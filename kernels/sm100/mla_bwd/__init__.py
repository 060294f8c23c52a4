"""The gradient of attention for Blackwell where K is V, of 512 columns."""
