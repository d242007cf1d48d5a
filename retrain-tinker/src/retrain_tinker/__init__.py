"""Training on a Tinker service for retrain: the hosted one, or SkyRL-tx on a machine of one's own."""

__version__ = "0.1.0"
