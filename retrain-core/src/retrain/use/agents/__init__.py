"""The user's own agents, in separate processes; the policy answers their calls to a model."""
