"""Benchmarks, quality measurements and simulators of kvboost_edge, and their shared code."""
