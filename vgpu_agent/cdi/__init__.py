"""CDI specs of all of a node's devices:
their making, their validity for runtimes, and their place.
"""
