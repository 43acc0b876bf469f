"""The node's offers: which families are on, what they offer, and the plugin servers of it."""
