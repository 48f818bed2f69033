"""The GPUs of this machine: which there are, and what NVML measures of them."""
