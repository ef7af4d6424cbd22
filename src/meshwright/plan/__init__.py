"""What every device will store, compute, send and spend, from closed forms alone. No torch here."""
