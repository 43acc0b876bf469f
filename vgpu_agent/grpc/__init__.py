"""gRPC over unix sockets, on our own event loop: servers, calls and socket files; no other package
imports grpclib.

Everything here moves bytes. `kubelet` speaks the kubelet's protocols with it.
"""
