"""MPS control daemons: started, told their limits, watched and stopped, one for each resource that is shared with MPS.

`supervision` is the way in: `agent` says which daemons there should be, in plans of `isolation.mps`, and asks why a resource must not be
offered.
"""
