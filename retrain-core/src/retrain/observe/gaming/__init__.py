"""Gaming that is seen: a second verifier beside the reward that is trained, and what tells that the two part."""
