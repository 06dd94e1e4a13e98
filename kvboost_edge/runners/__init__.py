"""Runners, which compute logits for flat batches of tokens. Importing this loads no torch."""
