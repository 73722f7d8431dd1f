"""What a model repository carries beside the model: the template of its card."""
