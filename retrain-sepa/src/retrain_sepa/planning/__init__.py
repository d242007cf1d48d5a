"""Planning tokens: which tokens of a completion plan rather than execute."""
