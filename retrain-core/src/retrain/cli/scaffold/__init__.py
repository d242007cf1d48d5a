"""Generates a new plugin: a distribution (`retrain plugin new`) or a single file (`retrain init-plugin`)."""
