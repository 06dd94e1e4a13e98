"""Weight sources: the tensors of a checkpoint, checked before they are read."""
