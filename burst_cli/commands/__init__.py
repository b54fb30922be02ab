"""One verb per file; `burst_cli.app` imports a file only when its verb runs."""
