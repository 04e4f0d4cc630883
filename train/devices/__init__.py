"""Training on CPUs, GPUs and several processes."""
