"""Pipeline schedules as tables: who computes what in which order, what it holds and how long it takes. No torch."""
