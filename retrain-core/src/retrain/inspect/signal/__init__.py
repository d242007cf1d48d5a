"""What a run drew and what it was good for: tokens by cause, prompts, credit, cost of held-out gain."""
