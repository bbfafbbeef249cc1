"""From files and flags to checked settings, and from settings to components."""
