"""Code that two kernels share. Nothing here is imported at run time."""
