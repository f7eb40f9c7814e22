"""Updates of some parameters on the host's cores, beside those on the device."""
