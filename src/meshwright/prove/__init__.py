"""Proof: the one-device oracle, parity of layouts, planted errors, the pool of ranks they run on."""
