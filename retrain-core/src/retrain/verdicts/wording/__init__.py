"""`retrain compare`: conditions against each other, over seeds, with tests and intervals."""
