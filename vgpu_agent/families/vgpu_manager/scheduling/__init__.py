"""The annotations on Nodes and pods of this family, for the scheduler extender."""
