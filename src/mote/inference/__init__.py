"""Inference: load models, offload experts, run exported models."""
