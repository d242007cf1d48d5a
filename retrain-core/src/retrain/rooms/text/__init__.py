"""Text and token ids: tokenizer, chat template, the transcript of an episode."""
