"""The gradient of `fwd_sm90`'s attention: who sees which keys, then the gradients of keys, then those of rows."""
