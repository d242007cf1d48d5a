"""Training on a Tinker service for retrain: the hosted one, or SkyRL-tx on your own machine."""

__version__ = "0.1.0"
