"""Benchmarks on a GPU: correctness first, then time, with the peers in the same run.

contestants.py says who computes what, regimes.py on which scores; attention.py, training.py and decode.py measure;
goals.py judges.
"""
