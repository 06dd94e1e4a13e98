"""Files that have all experts of a layer in one tensor, with rows as columns, or as MXFP4."""
