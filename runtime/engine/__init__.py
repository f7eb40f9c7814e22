"""What the ops do at the sites of a running step: save, move, bring back, compute again."""
