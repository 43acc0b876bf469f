"""The kubelet's side of the house: plugin servers, registration, and kubelet's own records of who holds what."""
