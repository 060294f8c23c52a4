"""Products of rows by group, all operands from shared memory: what training makes of a layer's experts."""
