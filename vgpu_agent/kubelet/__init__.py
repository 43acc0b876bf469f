"""The interface to the kubelet: plugin servers, registration,
and the kubelet's own records of what containers hold.
"""
