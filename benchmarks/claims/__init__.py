"""The claims that `benchmarks/evidence.py` simulates, a file per subject."""
