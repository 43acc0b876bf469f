"""The commands of the command line that simulate: `sim` and `demo`."""
