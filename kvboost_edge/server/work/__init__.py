"""Request handling, with the admission queue, the bridge to the engine, and streams."""
