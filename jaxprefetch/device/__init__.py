"""From batches in host memory to arrays on devices. Knows nothing of sources."""
