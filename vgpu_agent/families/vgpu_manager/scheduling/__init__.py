"""What a scheduler reads on Nodes and pods of this family."""
