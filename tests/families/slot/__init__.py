"""A family of its own, `example-slot`: the proof that one package is all that a family takes.
It exists for tests only.
"""
