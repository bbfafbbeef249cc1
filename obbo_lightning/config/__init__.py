"""From files and flags to one checked configuration, and from that to components."""
