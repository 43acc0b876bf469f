"""The command line: `main` parses and reports.
Each command has a module of its own that is imported on use.
"""
