"""What the models of the boards have in common."""
