"""What lives below the device while a plan runs."""
