"""Tries the reward before training: what must be right is right, and what a lazy policy could write instead is not."""
