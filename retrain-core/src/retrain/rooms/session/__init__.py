"""Runs the kernel in a process: assembly of parts, run folder, checkpoints, resume, signals."""
