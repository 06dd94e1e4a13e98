"""Operations of layers that keep a state instead of keys and values."""
