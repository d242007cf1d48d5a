"""`retrain init` writes a configuration, from a template or for data of your own."""
