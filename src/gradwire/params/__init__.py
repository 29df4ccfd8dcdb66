"""Parameters that several contexts share."""
