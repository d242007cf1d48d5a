"""The steps of a run: rounds of sampling, selection, several updates, their learning rate, overlap."""
