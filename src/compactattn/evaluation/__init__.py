"""Evaluation: exact match on the frozen test sets, and what several seeds say together."""
