"""CDI: the specs of all of a node's devices and of single grants,
their validity for runtimes, and the names that runtimes can resolve.
"""
