"""Layers with a recurrent state: Mamba-2, the gated delta rule, and short convolutions."""
