"""How a step is made of its prompts: rounds of sampling, shaping, several updates, their rate and loss, overlap."""
