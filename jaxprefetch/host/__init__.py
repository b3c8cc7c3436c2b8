"""From the source to batches in host memory. Knows nothing of devices."""
