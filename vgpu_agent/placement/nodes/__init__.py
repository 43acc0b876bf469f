"""Placement over the Nodes of a cluster: on which Node, and on which of its cards, a pod fits."""
