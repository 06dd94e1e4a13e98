"""Benchmarks, quality measurements and simulators of kvboost_edge, with what they share."""
