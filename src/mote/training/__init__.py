"""Training: task-aware contrastive learning on Sentence-Transformers' own trainer."""
