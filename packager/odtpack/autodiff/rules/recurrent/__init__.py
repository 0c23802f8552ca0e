"""Gradients of LSTM, GRU and RNN."""
