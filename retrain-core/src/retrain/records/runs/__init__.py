"""Readers for many runs and campaigns: their states, curves and results per example."""
