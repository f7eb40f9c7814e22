"""Which optimizer updates the host does."""
