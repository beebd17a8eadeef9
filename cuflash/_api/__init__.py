"""What does a user call? Validate, choose, run."""
