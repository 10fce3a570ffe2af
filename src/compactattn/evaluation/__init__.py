"""Evaluation: exact match on the frozen test sets, accuracy and distance on RegBench, and what several seeds say together."""
