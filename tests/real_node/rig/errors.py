"""Errors of a rig, in the two kinds that its callers treat differently.

Used by every module of this package; conftest.py turns the first kind into a skip (or a failure,
where the cluster is insisted on).
"""


class RigError(Exception):
    """The rig, or something in it, did not do what it was asked;
    the message ends with what to look at.
    """


class RequirementError(RigError):
    """This machine cannot hold a rig (no root, no Go, a package is missing);
    the message names the remedy.
    """
