"""What this machine does: operators, allocator, storage, clocks, memory."""
