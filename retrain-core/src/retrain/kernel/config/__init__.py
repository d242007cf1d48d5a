"""Resolves TOML, environment and command line into one configuration that records the origin of every value."""
