"""The command line: `main` parses and reports, and each command has a module of its own that is imported only when it is asked for."""
