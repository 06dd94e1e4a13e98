"""What bodies may hold, route by route."""
