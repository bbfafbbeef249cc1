"""The Lightning shell: it holds state and calls the core."""
