"""Replicas on a real Ray."""
