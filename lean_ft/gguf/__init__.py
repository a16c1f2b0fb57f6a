"""GGUF files, which llama.cpp runs: read as model folders, and written from models, by one row per family."""
