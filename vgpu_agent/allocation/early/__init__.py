"""Early binding, for runtimes that do not resolve CDI names: the answer is complete in Allocate, by
a guess that PreStartContainer proves.

`binding.EarlyBinding` is the only entry. When the last such runtime is gone, this package goes with
it.
"""
