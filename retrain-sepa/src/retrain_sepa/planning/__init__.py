"""Planning detectors: which tokens of a completion plan rather than execute."""
