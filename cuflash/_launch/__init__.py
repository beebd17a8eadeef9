"""How do kernels run? Parameters, grids, workspaces, streams."""
