"""How updates are combined across replicas: one way a file; ``train.synchronise`` puts them into a trainer."""
