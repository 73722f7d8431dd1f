"""Text data for training, evaluation, analysis and calibration."""
