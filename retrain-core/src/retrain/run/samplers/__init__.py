"""Who chooses the next prompts: samplers beside `uniform`, which is the session's own."""
