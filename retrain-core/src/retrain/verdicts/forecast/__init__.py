"""`retrain forecast`: the last held-out rate of a run from its first evaluations, and whether such forecasts held."""
