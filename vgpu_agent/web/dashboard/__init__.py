"""The page of the node for a browser. It shows the node without scripts as well, and with them it
follows each change by server-sent events.
"""
