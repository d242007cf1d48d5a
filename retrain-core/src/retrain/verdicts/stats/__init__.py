"""Tests, intervals and power: functions of arrays, which know nothing of runs."""
