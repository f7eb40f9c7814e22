"""The default policy: many attempts, each simulated, the best of them improved."""
