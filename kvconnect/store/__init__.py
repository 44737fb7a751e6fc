"""Places that keep blocks below the device."""
