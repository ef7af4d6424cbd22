"""Text becomes token files, samples, and the global batch of each step."""
