"""All that a plugin may import from the kernel, beside `retrain.advantages` and `retrain.testing`; frozen by a test."""


__all__ = [name for name in dir() if not name.startswith("_")]
