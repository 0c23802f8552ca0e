"""What runs in the child process."""
