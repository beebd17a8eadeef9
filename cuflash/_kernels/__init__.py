"""How is each kernel described? By a configuration and a parameter struct."""
