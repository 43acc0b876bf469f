"""The API server: the watches, the writers, and the connection. Built and connected by `agent`;
does not use the packages that talk to the driver or to the kubelet.
"""
