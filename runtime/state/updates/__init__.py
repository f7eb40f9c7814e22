"""An optimizer's step in buckets, and updates at the gradient."""
