"""Benchmarks: correctness first, then time, with the peers in the same run. See benchmarks/README.md."""
