"""The texts on Nodes and pods of this family, for a scheduler."""
