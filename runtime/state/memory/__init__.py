"""Memory of the training state: its tensors keep their addresses while their bytes come and go."""
