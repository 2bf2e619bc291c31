"""How long and how much memory: clusters, op times, the neutral schedule and its simulation."""
