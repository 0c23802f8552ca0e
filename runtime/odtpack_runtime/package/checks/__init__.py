"""What the checks of a package read from its files, and how they say what differs."""
