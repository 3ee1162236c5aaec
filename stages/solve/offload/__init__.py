"""Plans that use the tier below the device."""
