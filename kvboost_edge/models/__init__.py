"""Model files: location, checks, fingerprint, and the checkpoint that is parsed once."""
