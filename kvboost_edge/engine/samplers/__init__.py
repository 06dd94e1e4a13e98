"""Samplers beyond temperature, top_k, top_p and min_p, applied in any order."""
