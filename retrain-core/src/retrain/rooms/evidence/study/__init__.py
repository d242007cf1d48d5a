"""Reads runs and campaigns, and judges their conditions against each other."""
