"""The Hugging Face Hub: download models and datasets, and resolve paths."""
