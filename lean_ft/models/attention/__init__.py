"""Attention: grouped-query and latent attention over padded, packed and cached inputs."""
