"""Families: one package for each vocabulary of resource names, ids, annotations and answers;
`family` defines their interface.

A family is pure translation between its vocabulary and the types in `model`. It does no I/O, keeps
no state beyond its options and never sees the kubelet.
"""
