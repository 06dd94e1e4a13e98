"""Parts of the torch backend: padded groups, attention, KV blocks, and Apple GPU support."""
