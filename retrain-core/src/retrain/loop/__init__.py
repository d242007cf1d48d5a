"""The training loop: draw prompts, sample, score, assign credit, train, record."""
