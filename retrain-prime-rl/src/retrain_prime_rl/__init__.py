"""Backend `prime_rl` for retrain: PRIME-RL trains the steps, and its weights are sampled from."""

__version__ = "0.1.0"
