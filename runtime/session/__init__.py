"""A training run over its steps: from unknown to measured to planned, and what plans teach."""
