"""What is done with experts: their life in folders, merging, compression, and export as dense models."""
