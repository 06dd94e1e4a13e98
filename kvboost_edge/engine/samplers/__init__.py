"""Samplers: the choice of the next token from logits, in the usual order of steps or any other."""
