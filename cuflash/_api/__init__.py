"""Which functions does a user call? Each validates a call, chooses its kernels and runs it."""
