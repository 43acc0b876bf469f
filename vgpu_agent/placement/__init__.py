"""Choosing devices for a request: pure functions on plain data, called by `families`, `allocation`
and `scheduler`.
"""
