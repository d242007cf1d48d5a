"""`retrain watch`: a page on this machine that follows one run while it goes on."""
