"""Speculative decoding: draft tokens by prompt lookup, their verification and cost."""
