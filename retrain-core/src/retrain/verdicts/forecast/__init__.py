"""`retrain status RUN --forecast`: a run's last held-out rate from its first evaluations, and past forecasts."""
