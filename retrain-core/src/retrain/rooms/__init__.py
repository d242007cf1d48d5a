"""Plugins that ship with the kernel: each stands on `retrain.kernel` and registers through the hooks."""
