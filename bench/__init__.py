"""Side by side with peers: the same model, data, threads and ranks, in one interleaved run."""
