"""Command that builds kernel libraries and shows the one in use."""
