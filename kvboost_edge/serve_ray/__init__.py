"""Replicas of one engine on several machines, and which of them a request goes to."""
