"""The host behind containers: a grant's spec file, directories and files,
the installed library, and the memory that containers use.
"""
