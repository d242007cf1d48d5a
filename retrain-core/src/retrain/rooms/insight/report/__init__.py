"""`retrain report`: a campaign, or runs, as one page that needs no network."""
