"""Attention over paged KV behind one interface: torch for CPUs, Triton kernels for GPUs."""
