"""Request handling: admission queue, bridge to the engine, streams."""
