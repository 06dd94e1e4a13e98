"""Chat templates and hostile texts."""
