"""A stand-in API server: objects, watches, and the faults that a test asks for."""
