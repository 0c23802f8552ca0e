"""The package: its manifest, its files, and verifying them."""
