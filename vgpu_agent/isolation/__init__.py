"""The backends that put a limit in force, one module each, and `edits`:
the things that a grant adds to a container.
"""
