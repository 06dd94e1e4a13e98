"""Readers and renderers of the deployment files."""
