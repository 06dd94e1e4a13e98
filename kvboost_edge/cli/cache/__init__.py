"""What the command line says of blocks and packed weights on this machine's disk."""
