"""The CPU as a device: a pool for its tensors, and pages of training state that go to files."""
