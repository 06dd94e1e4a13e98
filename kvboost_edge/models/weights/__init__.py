"""Weight sources, which check the tensors of a checkpoint and read them."""
