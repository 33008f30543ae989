"""What scripts/try-images is made of."""
