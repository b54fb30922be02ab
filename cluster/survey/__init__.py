"""One POSIX-sh script that asks a node everything, and its answer cut into sections. Parsing happens on this side."""
