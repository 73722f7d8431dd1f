"""How far the experts of a model have specialised."""
