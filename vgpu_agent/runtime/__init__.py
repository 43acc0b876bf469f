"""What the container runtime and the container see: CDI specs, host directories and files of a grant, and the installed library."""
