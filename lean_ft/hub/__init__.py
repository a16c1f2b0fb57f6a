"""The Hugging Face Hub: download models and datasets, resolve paths, upload runs."""
