"""What puts a limit in force, one module a backend, and `edits`: what a grant adds to a container."""
