"""A rank as a process: its log, status files, injected faults, stop requests and exit."""
