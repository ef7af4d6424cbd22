"""What a run tells: metric sinks, progress, summaries."""
