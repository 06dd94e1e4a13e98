"""Replicas on a real Ray instance."""
