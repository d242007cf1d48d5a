"""Local training for retrain: the PyTorch/PEFT backend, its sampling engine and the built-in tiny model."""

__version__ = "0.1.0"
