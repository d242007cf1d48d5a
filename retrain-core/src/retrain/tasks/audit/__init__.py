"""Tries the verifier before training: right answers must score, and texts that solve nothing must not."""
