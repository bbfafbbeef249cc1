"""What f_t and g_t are."""
