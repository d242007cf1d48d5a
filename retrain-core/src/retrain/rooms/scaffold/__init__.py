"""Starts a plugin: a distribution of its own (`retrain plugin new`) or a single file (`retrain init-plugin`)."""
