"""Generates a new plugin: a single file, or a distribution."""
