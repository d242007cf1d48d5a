"""Samplers that learn from the outcomes of earlier steps, or go by difficulty."""
