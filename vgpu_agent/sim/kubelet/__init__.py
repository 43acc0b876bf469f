"""A stand-in kubelet on a gRPC library other than the agent's."""
