"""Verifiable tasks: data sources, and the verifiers that score them."""

__version__ = "0.1.0"
