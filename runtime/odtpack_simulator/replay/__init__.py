"""Real training in a child process, held to limits and interrupted."""
