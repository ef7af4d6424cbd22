"""The Ledger: what every rank stores, computes, sends and spends. Imports no torch."""
