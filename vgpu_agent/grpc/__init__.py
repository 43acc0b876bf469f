"""gRPC over unix sockets, on our own event loop: servers, calls and socket files; the only grpclib.

Everything here moves bytes. `kubelet` speaks the kubelet's protocols with it.
"""
