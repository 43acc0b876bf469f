"""The API server: the watches, the writers, and the connection. Wired by `agent`;
uses no other adapter.
"""
