"""This machine, asked through NVML, sysfs and CUDA."""
