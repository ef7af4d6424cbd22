"""Named, placed tensors on disk: written once, whole or not at all."""
