"""The API server: the watches, the writers, and the connection. Built and connected by `agent`;
does not use the other adapters, such as `gpu`, `kubelet` and `web`.
"""
