"""Speculative decoding with draft tokens from prompt lookup."""
