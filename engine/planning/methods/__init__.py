"""From settings to one attention method."""
