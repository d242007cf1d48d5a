"""Inference engines: their table and the engines that are servers; `pytorch` lives in retrain-local."""
