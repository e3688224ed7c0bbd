"""What links and kernels of a machine reach, from timings."""
