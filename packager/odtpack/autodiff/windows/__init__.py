"""Windows over planes: what convolutions, pools and resampling share."""
