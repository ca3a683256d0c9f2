"""Draw figures of measurements. Nothing is measured here."""
