"""Small disk and Redis tiers, and faulty ones."""
