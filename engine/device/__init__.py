"""How work runs on a device: blocks of rows, streams beside compute, host memory, live bytes."""
