"""A model becomes a distributed model, one idea a file."""
