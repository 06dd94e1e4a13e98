"""Requests and their prompts, options, checks, progress and results."""
