"""retrain: a plugin-first, TOML-first trainer for reinforcement learning with verifiable rewards."""

__version__ = "0.1.0"
