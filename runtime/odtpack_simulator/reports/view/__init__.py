"""What every report says, before any format."""
