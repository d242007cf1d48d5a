"""`ledger.jsonl`: runs, looks and verdicts in a chain of hashes."""
