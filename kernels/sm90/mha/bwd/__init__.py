"""The gradient of `mha_fwd_sm90`'s attention: the spans of tiles of rows, then dK and dV, and dQ; or all at once."""
