"""`retrain init` writes a configuration, from a template or for the user's own data."""
