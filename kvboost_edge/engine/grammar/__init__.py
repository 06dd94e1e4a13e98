"""Structured output: grammars, JSON schemas and choices, and the token masks made of them."""
