"""From an admitted request to the engine and back: the queue, the bridge, streams."""
