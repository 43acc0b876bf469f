"""MPS control daemons: started, configured, watched and stopped,
one for each resource that is shared with MPS.

`supervision` is the way in: `agent` passes the desired daemons, in plans of `isolation.mps`, and
asks why a resource must not be offered.
"""
