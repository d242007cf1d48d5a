"""The Python face of retrain: `retrain.train`, `retrain.load`, `retrain.compare`, `Run`."""
