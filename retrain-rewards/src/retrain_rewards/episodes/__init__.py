"""Episodes of environments that speak in chat messages: one event loop plays them with a policy that writes text."""
