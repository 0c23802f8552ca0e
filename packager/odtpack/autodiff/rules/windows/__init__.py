"""Gradients of convolutions, pools and resampling."""
