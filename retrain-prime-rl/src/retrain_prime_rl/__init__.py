"""Backend `prime_rl` for retrain: our steps on PRIME-RL's wire, its weights in the sampler."""

__version__ = "0.1.0"
