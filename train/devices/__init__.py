"""Computation on CPUs, GPUs and several processes."""
