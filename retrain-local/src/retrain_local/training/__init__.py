"""One optimizer step: rows packed without padding, log-probabilities in chunks, the policy loss."""
