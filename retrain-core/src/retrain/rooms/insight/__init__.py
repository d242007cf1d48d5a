"""Looking at flows and runs: a preflight without a model, and the credit of stored completions made visible."""
