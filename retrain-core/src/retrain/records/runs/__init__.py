"""Reads runs and campaigns: which there are, in what state, their curves and their results per example."""
