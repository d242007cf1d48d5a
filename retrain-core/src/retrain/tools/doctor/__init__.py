"""`retrain doctor`: whether this machine has what a configuration needs."""
