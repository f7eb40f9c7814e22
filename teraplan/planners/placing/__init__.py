"""Which tensors leave, to which tier, and when: what every policy is made of."""
