"""Vision towers: patches of images to embeddings for the decoder."""
