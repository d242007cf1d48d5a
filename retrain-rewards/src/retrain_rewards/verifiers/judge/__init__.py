"""The `judge` reward: a model behind an OpenAI-compatible API says how right an answer is."""
