"""What we know of each program that we run, one file each, every fact with its source. Pure."""
