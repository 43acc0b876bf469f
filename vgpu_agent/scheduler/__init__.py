"""The scheduler extender: a process of its own that tells a kube-scheduler on which Node, and on
which of its cards, a pod goes.
"""
