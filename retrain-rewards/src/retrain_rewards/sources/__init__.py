"""Where tasks come from: one module per `[data] source`, and what they share."""
