"""`retrain compare`: conditions against each other, over seeds, with honest statistics."""
