"""What a model repository carries besides the model: the templates of its cards."""
