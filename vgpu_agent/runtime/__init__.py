"""The interface to runtimes and containers:
CDI specs, a grant's host directories and files, the installed library.
"""
