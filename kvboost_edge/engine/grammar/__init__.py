"""Structured output: the grammar compiler and token masks."""
