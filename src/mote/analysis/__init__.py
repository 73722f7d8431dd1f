"""How far the experts of a model have specialised: similarity over tasks, divergence of roles, change of weights."""
