"""Tests, intervals and power as functions of arrays; they know nothing of runs."""
