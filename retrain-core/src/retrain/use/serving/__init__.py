"""A small server of OpenAI's API for a policy that samples in this process."""
