"""A process runs the kernel: parts assembled, run folder, checkpoints, resume, signals."""
