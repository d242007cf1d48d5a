"""Inference engines: their table; the engines that are servers come here, `pytorch` lives in retrain-local."""
