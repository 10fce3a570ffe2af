"""Experiments: functions that return complete configs, and what turns a config into a model, data and results."""
