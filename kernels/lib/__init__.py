"""What two kernels share. Nothing here is imported at run time."""
