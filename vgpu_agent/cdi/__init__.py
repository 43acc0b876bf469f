"""CDI specs of all of a node's devices: who makes them, whether a runtime would take them, and where they lie."""
